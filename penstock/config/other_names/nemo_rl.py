"""Names of NeMo-RL."""

from __future__ import annotations

from penstock.config.other_names.rows import Default, Defaults, Row, Table

SYSTEM = "NeMo-RL"

MODEL = Table(
    SYSTEM,
    (
        Row("`policy.model_name`, `policy.precision`", "`model.path`, `model.dtype`"),
        Row("`policy.tokenizer.name`", "no equivalent: the model's own tokenizer"),
        Row("`policy.dtensor_cfg.activation_checkpointing`", "`training.gradient_checkpointing`"),
        Row(
            "`policy.dtensor_cfg.lora_cfg.enabled`, `policy.dtensor_cfg.lora_cfg.dim`, "
            "`policy.dtensor_cfg.lora_cfg.alpha`",
            "`model.lora`, `model.lora.rank`, `model.lora.alpha`",
            "on their main branch, `automodel_cfg` replaces `dtensor_cfg`",
        ),
        Row(
            "`policy.dtensor_cfg.lora_cfg.match_all_linear`, `policy.dtensor_cfg.lora_cfg.target_modules`",
            "`model.lora.target_modules`",
            "`all-linear` or a list",
            for_each=True,
        ),
        Row("`grpo.num_prompts_per_step`", "`training.prompt_groups_per_step`"),
        Row("`grpo.num_generations_per_prompt`", "`rollout.group_size`"),
        Row(
            "`policy.train_global_batch_size`",
            "`training.minibatches_per_step`",
            "theirs is a number of responses; ours is the step's responses divided by it",
        ),
        Row(
            "`policy.train_micro_batch_size`, `policy.dynamic_batching.train_mb_tokens`, "
            "`policy.sequence_packing.train_mb_tokens`",
            "`training.max_tokens_per_microbatch`",
        ),
        Row("`policy.sequence_packing.enabled`", "`training.batching: packed`"),
        Row("`policy.logprob_chunk_size`", "`training.logprob_chunk_tokens`"),
        Row("`grpo.max_num_steps`, `grpo.max_num_epochs`", "`training.max_steps`, `data.epochs`"),
        Row(
            "`cluster.num_nodes`, `cluster.gpus_per_node`, `policy.dtensor_cfg.tensor_parallel_size`, "
            "`policy.megatron_cfg.enabled`, `policy.generation.vllm_cfg.tensor_parallel_size`",
            "no equivalent yet: one process, one device",
        ),
    ),
)

GENERATION = Table(
    SYSTEM,
    (
        Row(
            "`policy.generation.max_new_tokens`",
            "`rollout.sampling.max_new_tokens`",
            "must leave room for the prompt",
        ),
        Row(
            "`policy.max_total_sequence_length`, `policy.generation.vllm_cfg.max_model_len`",
            "`rollout.engine.max_model_len`",
        ),
        Row(
            "`policy.generation.temperature`, `policy.generation.stop_token_ids`",
            "`rollout.sampling.temperature`, `rollout.sampling.stop_token_ids`",
        ),
        Row(
            "`policy.generation.top_p`, `policy.generation.top_k`",
            "`rollout.sampling.top_p`, `rollout.sampling.top_k`",
            "theirs filters the trainer's logits by the trainer's own probabilities; ours keeps the tokens that the "
            "engine kept",
        ),
        Row("`policy.generation.stop_strings`", "`rollout.sampling.stop`", "rewards see the stop string"),
        Row(
            "`policy.tokenizer.chat_template_kwargs`", "`data.chat_template_kwargs`", "with `data.chat_template: true`"
        ),
        Row("`policy.generation.backend`", "`rollout.engine.kind: embedded`"),
        Row("`data.train.data_path`, `data.validation.data_path`", "`data.train_path`, `data.eval_path`"),
        Row("`data.train.input_key`, `data.train.output_key`", "`data.prompt_key`, `data.answer_key`"),
        Row("`data.train.split`, `data.train.subset`", "`data.train_split`, `data.subset`"),
        Row(
            "`data.default.prompt_file`, `data.default.system_prompt_file`, `data.train.split_validation_size`",
            "no equivalent",
            "put it in the data",
        ),
        Row("`data.shuffle`, `grpo.seed`", "`data.shuffle`, `seed`"),
        Row(
            "`data.default.env_name: math`, `env.math.num_workers`",
            "`rollout.environment.kind: math`, `rollout.environment.workers`",
        ),
        Row("`register_env`", "`rollout.environment.kind: custom`", "`rollout.environment.import_path`"),
        Row(
            "`grpo.max_rollout_turns`",
            "`rollout.environment.args`",
            "set by the environment; `calculator` has `max_turns`",
        ),
    ),
)

ALGORITHM = Table(
    SYSTEM,
    (
        Row("`loss_fn.token_level_loss`", "`algorithm.loss.aggregation`", "`token_mean` or `sequence_mean`"),
        Row(
            "`loss_fn.ratio_clip_min`, `loss_fn.ratio_clip_max`",
            "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`",
        ),
        Row("`loss_fn.ratio_clip_c`", "`algorithm.loss.dual_clip`"),
        Row(
            "`loss_fn.sequence_level_importance_ratios: true`",
            "`algorithm.loss.kind: gspo`",
            "clip ranges have a different scale and different defaults",
        ),
        Row("`loss_fn.use_cispo: true`", "`algorithm.loss.kind: cispo`"),
        Row("`loss_fn.disable_ppo_ratio: true`", "`algorithm.loss.kind: reinforce`"),
        Row(
            "`loss_fn.force_on_policy_ratio`",
            "always, with one update per step",
            "the ratio is 1 unless `algorithm.old_policy: engine`",
        ),
        Row("`loss_fn.reference_policy_kl_penalty`", "`algorithm.kl.coefficient`"),
        Row(
            "`loss_fn.reference_policy_kl_type`",
            "`algorithm.kl.estimator`",
            "`k1` only with `algorithm.kl.place: reward`",
        ),
        Row(
            "`loss_fn.use_kl_in_reward`",
            "`algorithm.kl.place: reward`",
            "theirs charges each token for its own KL only; ours also for the KL of the tokens after it",
        ),
        Row(
            "`loss_fn.use_on_policy_kl_approximation`, `loss_fn.kl_input_clamp_value`, `loss_fn.kl_output_clamp_value`",
            "no equivalent",
            "their newer versions also add the score-function gradient to the penalty",
        ),
        Row(
            "`grpo.adv_estimator.name: grpo`",
            "`algorithm.advantage.kind`",
            "by `grpo.use_leave_one_out_baseline` and `grpo.normalize_rewards`",
        ),
        Row(
            "`grpo.use_leave_one_out_baseline`, `grpo.normalize_rewards`",
            "`algorithm.advantage.kind: leave_one_out`",
            "both on. First only: `rloo`. Second only: `grpo`. Neither: `grpo` with "
            "`algorithm.advantage.normalize_std: false`",
            for_each=(
                "with `grpo.normalize_rewards`; without it `rloo`",
                "with `grpo.use_leave_one_out_baseline`; without it `grpo`",
            ),
        ),
        Row(
            "`grpo.adv_estimator.name: reinforce_plus_plus`",
            "`algorithm.advantage.kind: reinforce_pp_baseline`",
            "their `minus_baseline: false` is `reinforce_pp`; needs the whole batch",
        ),
        Row("`grpo.adv_estimator.name: gdpo`, `grpo.advantage_clip_low`, `grpo.advantage_clip_high`", "no equivalent"),
        Row(
            "`grpo.use_dynamic_sampling`",
            "`algorithm.dynamic_sampling.enabled`",
            "ours looks at the shaped reward; in newer versions, theirs looks at the unshaped one",
        ),
        Row(
            "`grpo.dynamic_sampling_max_gen_batches`",
            "`algorithm.dynamic_sampling.max_filtered_per_step`",
            "batches there, groups here",
        ),
        Row("`grpo.batch_multiplier`", "no equivalent: groups are replaced one by one"),
        Row("`grpo.overlong_filtering`", "`algorithm.reward.overlong: mask`"),
        Row(
            "`grpo.reward_shaping.enabled`",
            "`algorithm.reward.overlong: soft`",
            "`algorithm.reward.overlong_buffer`, `algorithm.reward.overlong_penalty`; the limit is "
            "`rollout.sampling.max_new_tokens`",
        ),
        Row(
            "`grpo.reward_scaling.enabled`",
            "`algorithm.reward.scale`, `algorithm.reward.clip_low`, `algorithm.reward.clip_high`",
            "theirs clips, then maps one range onto another; ours scales, then clips, and does not shift",
        ),
        Row(
            "`policy.optimizer.kwargs.lr`, `policy.optimizer.kwargs.weight_decay`, `policy.optimizer.kwargs.betas`,"
            " `policy.optimizer.kwargs.eps`",
            "`training.optimizer.lr`, `training.optimizer.weight_decay`, `training.optimizer.betas`, "
            "`training.optimizer.eps`",
        ),
        Row(
            "`policy.scheduler`",
            "`training.optimizer.warmup_steps`, `training.optimizer.schedule`",
            "the warm-up starts at lr / steps",
        ),
        Row("`policy.max_grad_norm`", "`training.optimizer.max_grad_norm`"),
    ),
)

STALENESS = Table(
    SYSTEM,
    (
        Row(
            "`loss_fn.use_importance_sampling_correction: true`",
            "`algorithm.correction.kind: decoupled`",
            "the weight is not bounded; `algorithm.correction.cap` drops tokens above it",
        ),
        Row(
            "`loss_fn.truncated_importance_sampling_type: tis`",
            "`algorithm.correction.kind: tis`",
            "`algorithm.correction.cap` is their `truncated_importance_sampling_ratio`; no lower bound",
        ),
        Row("`loss_fn.truncated_importance_sampling_type: icepop`", "`algorithm.correction.kind: icepop`"),
        Row(
            "`loss_fn.truncated_importance_sampling_type: seq-mask-tis`",
            "`algorithm.correction.kind: sequence_masked`",
            "`algorithm.correction.mean: geometric`; theirs keeps each token's own weight, ours "
            "gives every token the weight of its response",
        ),
        Row("`grpo.seq_logprob_error_threshold`", "no equivalent"),
        Row("`grpo.async_grpo.enabled: false`", "`staleness.policy: on_policy`", "ours streams inside the step"),
        Row("`grpo.async_grpo.max_trajectory_age_steps`", "`staleness.lookahead`", "with `staleness.policy: in_order`"),
        Row("`grpo.async_grpo.in_flight_weight_updates`", "`weight_sync.mode`", "`in_flight`; false is `drain`"),
        Row("`grpo.async_grpo.recompute_kv_cache_after_weight_updates`", "`weight_sync.kv_cache: recompute`"),
        Row(
            "`async_rl.sampler.name: in_order`, `async_rl.sampler.max_lookahead_versions`",
            "`staleness.policy: in_order`, `staleness.lookahead`",
        ),
        Row(
            "`async_rl.sampler.name: windowed`, `async_rl.sampler.max_staleness_versions`",
            "`staleness.policy: windowed`, `staleness.max_staleness`",
            "theirs dispatches until the buffer is full: `staleness.over_sampling: true`",
        ),
        Row("`async_rl.sampler.sample_freshest_first`", "`staleness.order: freshest`"),
        Row(
            "`async_rl.sampler.name: weight_fifo`",
            "`staleness.policy: weight_fifo`",
            "their single number sets both `staleness.max_staleness` and `staleness.lookahead`",
        ),
        Row(
            "`async_rl.sampler.name: ready_first`",
            "`staleness.policy: ready_first`",
            "their number is our `staleness.lookahead`; needs a correction",
        ),
        Row("`async_rl.sampler.name: custom`", "`staleness.policy: custom`", "`staleness.import_path`"),
        Row("`async_rl.min_groups_for_streaming_train`", "`training.min_groups_per_chunk`"),
        Row(
            "`async_rl.max_inflight_prompts`, `async_rl.max_buffered_rollouts`",
            "`rollout.max_inflight_groups`, `buffer.max_buffered_groups`",
        ),
        Row(
            "`async_rl.rollout_failure.max_infra_attempts_per_prompt`, "
            "`async_rl.rollout_failure.max_data_attempts_per_prompt`",
            "`rollout.failure.infra_attempts`, `rollout.failure.data_attempts`",
        ),
        Row(
            "`async_rl.rollout_failure.max_skipped_prompts`",
            "`rollout.failure.max_dropped_prompts`",
            "ours counts both kinds of failure",
        ),
        Row(
            "`async_rl.rollout_failure.on_dropped_prompt`, `async_rl.rollout_failure.min_step_batch_fraction`",
            "`rollout.failure.on_drop`, `rollout.failure.min_groups_per_step`",
            "a fraction there, groups here",
        ),
        Row(
            "`async_rl.stall_watchdog.stall_timeout_s`, `async_rl.stall_watchdog.stall_action`",
            "`rollout.failure.stall_seconds`, `rollout.failure.on_stall`",
        ),
    ),
)

RECORDS = Table(
    SYSTEM,
    (
        Row("`checkpointing.checkpoint_dir`, `logger.log_dir`", "`run_dir`"),
        Row(
            "`checkpointing.save_period`",
            "`checkpoint.every_steps`",
            "a model folder for transformers, no conversion",
        ),
        Row(
            "`checkpointing.keep_top_k`, `checkpointing.metric_name`",
            "`checkpoint.keep_best`, `checkpoint.best_metric`",
            "in addition to the `checkpoint.keep_latest` newest",
        ),
        Row("`checkpointing.checkpoint_must_save_by`", "`training.max_minutes`", "ends the run, with a checkpoint"),
        Row(
            "`logger.wandb_enabled`, `logger.tensorboard_enabled`, `logger.mlflow_enabled`",
            "`observe.wandb: {}`, `observe.tensorboard: {}`, `observe.mlflow: {}`",
        ),
        Row("`logger.wandb.project`, `logger.wandb.name`", "`observe.wandb.project`, `observe.wandb.name`"),
        Row("`logger.monitor_gpus`", "no equivalent"),
        Row(
            "`grpo.val_at_start`, `grpo.val_at_end`, `grpo.val_period`",
            "`eval.at_start`, `eval.at_end`, `eval.every_steps`",
        ),
        Row("`grpo.max_val_samples`", "`data.eval_size`"),
    ),
)

DEFAULTS = Defaults(
    SYSTEM,
    (
        Default("`grpo.num_prompts_per_step`", "`32`", "training.prompt_groups_per_step"),
        Default("`grpo.num_generations_per_prompt`", "`16`", "rollout.group_size"),
        Default("`loss_fn.reference_policy_kl_penalty`", "`0.01`", "algorithm.kl.coefficient"),
        Default("`grpo.use_leave_one_out_baseline`", "`true`: leave one out", "algorithm.advantage.kind"),
        Default("epsilon of the advantage", "`1e-6`", "algorithm.advantage.epsilon"),
        Default("`policy.precision`", "`bfloat16`", "model.dtype"),
        Default("`policy.sequence_packing.enabled`", "`true`", "training.batching"),
        Default("`policy.optimizer.kwargs.lr`", "`5e-6`", "training.optimizer.lr"),
        Default("`policy.optimizer.kwargs.weight_decay`", "`0.01`", "training.optimizer.weight_decay"),
        Default("`policy.scheduler`", "warm-up of 50 updates", "training.optimizer.warmup_steps"),
        Default("`policy.dtensor_cfg.lora_cfg.dim`", "`8`", "model.lora.rank"),
        Default("`grpo.val_at_start`", "`false`", "eval.at_start"),
    ),
)

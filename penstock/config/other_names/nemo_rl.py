"""Names of NeMo-RL."""

from __future__ import annotations

from penstock.config.other_names.entries import Default, Defaults, Entry, Table

SYSTEM = "NeMo-RL"

MODEL = Table(
    SYSTEM,
    (
        Entry("`policy.model_name`, `policy.precision`", "`model.path`, `model.dtype`"),
        Entry("`policy.tokenizer.name`", "no equivalent: the model's own tokenizer"),
        Entry("`policy.dtensor_cfg.activation_checkpointing`", "`training.gradient_checkpointing`"),
        Entry(
            "`policy.dtensor_cfg.lora_cfg.enabled`, `policy.dtensor_cfg.lora_cfg.dim`, "
            "`policy.dtensor_cfg.lora_cfg.alpha`",
            "`model.lora`, `model.lora.rank`, `model.lora.alpha`",
            "on their main branch, `automodel_cfg` replaces `dtensor_cfg`",
        ),
        Entry(
            "`policy.dtensor_cfg.lora_cfg.match_all_linear`, `policy.dtensor_cfg.lora_cfg.target_modules`",
            "`model.lora.target_modules`",
            "`all-linear` or a list",
            for_each=True,
        ),
        Entry("`grpo.num_prompts_per_step`", "`training.prompt_groups_per_step`"),
        Entry("`grpo.num_generations_per_prompt`", "`rollout.group_size`"),
        Entry(
            "`policy.train_global_batch_size`",
            "`training.minibatches_per_step`",
            "theirs is a number of responses; ours is the step's responses divided by it",
        ),
        Entry(
            "`policy.train_micro_batch_size`, `policy.dynamic_batching.train_mb_tokens`, "
            "`policy.sequence_packing.train_mb_tokens`",
            "`training.max_tokens_per_microbatch`",
        ),
        Entry("`policy.sequence_packing.enabled`", "`training.batching: packed`"),
        Entry("`policy.logprob_chunk_size`", "`training.logprob_chunk_tokens`"),
        Entry("`grpo.max_num_steps`, `grpo.max_num_epochs`", "`training.max_steps`, `data.epochs`"),
        Entry(
            "`cluster.num_nodes`, `cluster.gpus_per_node`, `policy.dtensor_cfg.tensor_parallel_size`, "
            "`policy.megatron_cfg.enabled`, `policy.generation.vllm_cfg.tensor_parallel_size`",
            "no equivalent yet: one process, one device",
        ),
    ),
)

GENERATION = Table(
    SYSTEM,
    (
        Entry(
            "`policy.generation.max_new_tokens`",
            "`rollout.sampling.max_new_tokens`",
            "must leave room for the prompt",
        ),
        Entry(
            "`policy.max_total_sequence_length`, `policy.generation.vllm_cfg.max_model_len`",
            "`rollout.engine.max_model_len`",
        ),
        Entry(
            "`policy.generation.temperature`, `policy.generation.stop_token_ids`",
            "`rollout.sampling.temperature`, `rollout.sampling.stop_token_ids`",
        ),
        Entry(
            "`policy.generation.top_p`, `policy.generation.top_k`",
            "`rollout.sampling.top_p`, `rollout.sampling.top_k`",
            "theirs filters the trainer's logits by the trainer's own probabilities; ours keeps the tokens that the "
            "engine kept",
        ),
        Entry("`policy.generation.stop_strings`", "`rollout.sampling.stop`", "rewards see the stop string"),
        Entry(
            "`policy.tokenizer.chat_template_kwargs`", "`data.chat_template_kwargs`", "with `data.chat_template: true`"
        ),
        Entry("`policy.generation.backend`", "`rollout.engine.kind: embedded`"),
        Entry("`data.train.data_path`, `data.validation.data_path`", "`data.train_path`, `data.eval_path`"),
        Entry("`data.train.input_key`, `data.train.output_key`", "`data.prompt_key`, `data.answer_key`"),
        Entry("`data.train.split`, `data.train.subset`", "`data.train_split`, `data.subset`"),
        Entry(
            "`data.default.prompt_file`, `data.default.system_prompt_file`, `data.train.split_validation_size`",
            "no equivalent",
            "put it in the data",
        ),
        Entry("`data.shuffle`, `grpo.seed`", "`data.shuffle`, `seed`"),
        Entry(
            "`data.default.env_name: math`, `env.math.num_workers`",
            "`rollout.environment.kind: math`, `rollout.environment.workers`",
        ),
        Entry("`register_env`", "`rollout.environment.kind: custom`", "`rollout.environment.import_path`"),
        Entry(
            "`grpo.max_rollout_turns`",
            "`rollout.environment.args`",
            "set by the environment; `calculator` has `max_turns`",
        ),
    ),
)

ALGORITHM = Table(
    SYSTEM,
    (
        Entry("`loss_fn.token_level_loss`", "`algorithm.loss.aggregation`", "`token_mean` or `sequence_mean`"),
        Entry(
            "`loss_fn.ratio_clip_min`, `loss_fn.ratio_clip_max`",
            "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`",
        ),
        Entry("`loss_fn.ratio_clip_c`", "`algorithm.loss.dual_clip`"),
        Entry(
            "`loss_fn.sequence_level_importance_ratios: true`",
            "`algorithm.loss.kind: gspo`",
            "clip ranges have a different scale and different defaults",
        ),
        Entry("`loss_fn.use_cispo: true`", "`algorithm.loss.kind: cispo`"),
        Entry("`loss_fn.disable_ppo_ratio: true`", "`algorithm.loss.kind: reinforce`"),
        Entry(
            "`loss_fn.force_on_policy_ratio`",
            "always, with one update per step",
            "the ratio is 1 unless `algorithm.old_policy: engine`",
        ),
        Entry("`loss_fn.reference_policy_kl_penalty`", "`algorithm.kl.coefficient`"),
        Entry(
            "`loss_fn.reference_policy_kl_type`",
            "`algorithm.kl.estimator`",
            "`k1` only with `algorithm.kl.place: reward`",
        ),
        Entry(
            "`loss_fn.use_kl_in_reward`",
            "`algorithm.kl.place: reward`",
            "theirs charges each token for its own KL only; ours also for the KL of the tokens after it",
        ),
        Entry(
            "`loss_fn.use_on_policy_kl_approximation`, `loss_fn.kl_input_clamp_value`, `loss_fn.kl_output_clamp_value`",
            "no equivalent",
            "their newer versions also add the score-function gradient to the penalty",
        ),
        Entry(
            "`grpo.adv_estimator.name: grpo`",
            "`algorithm.advantage.kind`",
            "by `grpo.use_leave_one_out_baseline` and `grpo.normalize_rewards`",
        ),
        Entry(
            "`grpo.use_leave_one_out_baseline`, `grpo.normalize_rewards`",
            "`algorithm.advantage.kind: leave_one_out`",
            "both on. First only: `rloo`. Second only: `grpo`. Neither: `grpo` with "
            "`algorithm.advantage.normalize_std: false`",
            for_each=(
                "with `grpo.normalize_rewards`; without it `rloo`",
                "with `grpo.use_leave_one_out_baseline`; without it `grpo`",
            ),
        ),
        Entry(
            "`grpo.adv_estimator.name: reinforce_plus_plus`",
            "`algorithm.advantage.kind: reinforce_pp_baseline`",
            "their `minus_baseline: false` is `reinforce_pp`; needs the whole batch",
        ),
        Entry(
            "`grpo.adv_estimator.name: gdpo`, `grpo.advantage_clip_low`, `grpo.advantage_clip_high`", "no equivalent"
        ),
        Entry(
            "`grpo.use_dynamic_sampling`",
            "`algorithm.dynamic_sampling.enabled`",
            "ours looks at the shaped reward; in newer versions, theirs looks at the unshaped one",
        ),
        Entry(
            "`grpo.dynamic_sampling_max_gen_batches`",
            "`algorithm.dynamic_sampling.max_filtered_per_step`",
            "batches there, groups here",
        ),
        Entry("`grpo.batch_multiplier`", "no equivalent: groups are replaced one by one"),
        Entry("`grpo.overlong_filtering`", "`algorithm.reward.overlong: mask`"),
        Entry(
            "`grpo.reward_shaping.enabled`",
            "`algorithm.reward.overlong: soft`",
            "`algorithm.reward.overlong_buffer`, `algorithm.reward.overlong_penalty`; the limit is "
            "`rollout.sampling.max_new_tokens`",
        ),
        Entry(
            "`grpo.reward_scaling.enabled`",
            "`algorithm.reward.scale`, `algorithm.reward.clip_low`, `algorithm.reward.clip_high`",
            "theirs clips, then maps one range onto another; ours scales, then clips, and does not shift",
        ),
        Entry(
            "`policy.optimizer.kwargs.lr`, `policy.optimizer.kwargs.weight_decay`, `policy.optimizer.kwargs.betas`,"
            " `policy.optimizer.kwargs.eps`",
            "`training.optimizer.lr`, `training.optimizer.weight_decay`, `training.optimizer.betas`, "
            "`training.optimizer.eps`",
        ),
        Entry(
            "`policy.scheduler`",
            "`training.optimizer.warmup_steps`, `training.optimizer.schedule`",
            "the warm-up starts at lr / steps",
        ),
        Entry("`policy.max_grad_norm`", "`training.optimizer.max_grad_norm`"),
    ),
)

STALENESS = Table(
    SYSTEM,
    (
        Entry(
            "`loss_fn.use_importance_sampling_correction: true`",
            "`algorithm.correction.kind: decoupled`",
            "the weight is not bounded; `algorithm.correction.cap` drops tokens above it",
        ),
        Entry(
            "`loss_fn.truncated_importance_sampling_type: tis`",
            "`algorithm.correction.kind: tis`",
            "`algorithm.correction.cap` is their `truncated_importance_sampling_ratio`; no lower bound",
        ),
        Entry("`loss_fn.truncated_importance_sampling_type: icepop`", "`algorithm.correction.kind: icepop`"),
        Entry(
            "`loss_fn.truncated_importance_sampling_type: seq-mask-tis`",
            "`algorithm.correction.kind: sequence_masked`",
            "`algorithm.correction.mean: geometric`; theirs keeps each token's own weight, ours "
            "gives every token the weight of its response",
        ),
        Entry("`grpo.seq_logprob_error_threshold`", "no equivalent"),
        Entry("`grpo.async_grpo.enabled: false`", "`staleness.policy: on_policy`", "ours streams inside the step"),
        Entry(
            "`grpo.async_grpo.max_trajectory_age_steps`", "`staleness.lookahead`", "with `staleness.policy: in_order`"
        ),
        Entry("`grpo.async_grpo.in_flight_weight_updates`", "`weight_sync.mode`", "`in_flight`; false is `drain`"),
        Entry("`grpo.async_grpo.recompute_kv_cache_after_weight_updates`", "`weight_sync.kv_cache: recompute`"),
        Entry(
            "`async_rl.sampler.name: in_order`, `async_rl.sampler.max_lookahead_versions`",
            "`staleness.policy: in_order`, `staleness.lookahead`",
        ),
        Entry(
            "`async_rl.sampler.name: windowed`, `async_rl.sampler.max_staleness_versions`",
            "`staleness.policy: windowed`, `staleness.max_staleness`",
            "theirs dispatches until the buffer is full: `staleness.over_sampling: true`",
        ),
        Entry("`async_rl.sampler.sample_freshest_first`", "`staleness.order: freshest`"),
        Entry(
            "`async_rl.sampler.name: weight_fifo`",
            "`staleness.policy: weight_fifo`",
            "their single number sets both `staleness.max_staleness` and `staleness.lookahead`",
        ),
        Entry(
            "`async_rl.sampler.name: ready_first`",
            "`staleness.policy: ready_first`",
            "their number is our `staleness.lookahead`; needs a correction",
        ),
        Entry("`async_rl.sampler.name: custom`", "`staleness.policy: custom`", "`staleness.import_path`"),
        Entry("`async_rl.min_groups_for_streaming_train`", "`training.min_groups_per_chunk`"),
        Entry(
            "`async_rl.max_inflight_prompts`, `async_rl.max_buffered_rollouts`",
            "`rollout.max_inflight_groups`, `buffer.max_buffered_groups`",
        ),
        Entry(
            "`async_rl.rollout_failure.max_infra_attempts_per_prompt`, "
            "`async_rl.rollout_failure.max_data_attempts_per_prompt`",
            "`rollout.failure.infra_attempts`, `rollout.failure.data_attempts`",
        ),
        Entry(
            "`async_rl.rollout_failure.max_skipped_prompts`",
            "`rollout.failure.max_dropped_prompts`",
            "ours counts both kinds of failure",
        ),
        Entry(
            "`async_rl.rollout_failure.on_dropped_prompt`, `async_rl.rollout_failure.min_step_batch_fraction`",
            "`rollout.failure.on_drop`, `rollout.failure.min_groups_per_step`",
            "a fraction there, groups here",
        ),
        Entry(
            "`async_rl.stall_watchdog.stall_timeout_s`, `async_rl.stall_watchdog.stall_action`",
            "`rollout.failure.stall_seconds`, `rollout.failure.on_stall`",
        ),
    ),
)

RECORDS = Table(
    SYSTEM,
    (
        Entry("`checkpointing.checkpoint_dir`, `logger.log_dir`", "`run_dir`"),
        Entry(
            "`checkpointing.save_period`",
            "`checkpoint.every_steps`",
            "a model folder for transformers, no conversion",
        ),
        Entry(
            "`checkpointing.keep_top_k`, `checkpointing.metric_name`",
            "`checkpoint.keep_best`, `checkpoint.best_metric`",
            "in addition to the `checkpoint.keep_latest` newest",
        ),
        Entry("`checkpointing.checkpoint_must_save_by`", "`training.max_minutes`", "ends the run, with a checkpoint"),
        Entry(
            "`logger.wandb_enabled`, `logger.tensorboard_enabled`, `logger.mlflow_enabled`",
            "`observe.wandb: {}`, `observe.tensorboard: {}`, `observe.mlflow: {}`",
        ),
        Entry("`logger.wandb.project`, `logger.wandb.name`", "`observe.wandb.project`, `observe.wandb.name`"),
        Entry("`logger.monitor_gpus`", "no equivalent"),
        Entry(
            "`grpo.val_at_start`, `grpo.val_at_end`, `grpo.val_period`",
            "`eval.at_start`, `eval.at_end`, `eval.every_steps`",
        ),
        Entry("`grpo.max_val_samples`", "`data.eval_size`"),
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

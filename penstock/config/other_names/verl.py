"""Names of verl; names below `actor_rollout_ref` are written without it."""

from __future__ import annotations

from penstock.config.other_names.entries import Default, Defaults, Entry, Table

SYSTEM = "verl"

MODEL = Table(
    SYSTEM,
    (
        Entry("`model.path`, `model.trust_remote_code`", "`model.path`, `model.trust_remote_code`"),
        Entry("`actor.fsdp_config.model_dtype`, `rollout.dtype`", "`model.dtype`", "one dtype for trainer and engine"),
        Entry(
            "`model.override_config.attn_implementation`",
            "`model.attn_implementation`",
            "`sdpa` or `eager`; no flash attention",
        ),
        Entry("`model.enable_gradient_checkpointing`", "`training.gradient_checkpointing`"),
        Entry("`model.use_remove_padding`", "`training.batching: packed`"),
        Entry(
            "`model.lora_rank`, `model.lora_alpha`, `model.target_modules`, `model.lora_adapter_path`",
            "`model.lora.rank`, `model.lora.alpha`, `model.lora.target_modules`, `model.lora.path`",
            "rank 0 there means no section `model.lora` here",
        ),
        Entry("`data.train_batch_size`", "`training.prompt_groups_per_step`", "both count prompts"),
        Entry("`rollout.n`", "`rollout.group_size`"),
        Entry(
            "`actor.ppo_mini_batch_size`",
            "`training.minibatches_per_step`",
            "theirs is a number of prompts; ours is their `train_batch_size` divided by it",
        ),
        Entry(
            "`actor.ppo_micro_batch_size_per_gpu`, `actor.use_dynamic_bsz`, `actor.ppo_max_token_len_per_gpu`",
            "`training.max_tokens_per_microbatch`",
            "always counted in tokens",
            for_each=True,
        ),
        Entry("`actor.ppo_epochs`", "no equivalent: a group is trained once"),
        Entry("`trainer.total_epochs`, `trainer.total_training_steps`", "`data.epochs`, `training.max_steps`"),
        Entry(
            "`trainer.nnodes`, `trainer.n_gpus_per_node`, `rollout.tensor_model_parallel_size`, `actor.strategy`",
            "no equivalent yet: one process, one device",
            "`runtime.device`",
        ),
    ),
)

GENERATION = Table(
    SYSTEM,
    (
        Entry(
            "`data.max_response_length`",
            "`rollout.sampling.max_new_tokens`",
            "per turn, in a multi-turn environment",
        ),
        Entry(
            "`data.max_prompt_length`, `rollout.max_model_len`",
            "`rollout.engine.max_model_len`",
            "prompt and response together",
            for_each=True,
        ),
        Entry(
            "`data.truncation`, `data.filter_overlong_prompts`",
            "`data.overlong`",
            "`error`, `truncate_left` for their `left`, or `drop` for their filter",
            for_each=True,
        ),
        Entry("`rollout.temperature`, `rollout.top_p`", "`rollout.sampling.temperature`, `rollout.sampling.top_p`"),
        Entry("`rollout.top_k`", "`rollout.sampling.top_k`", "all tokens: -1 there, 0 here"),
        Entry("`rollout.name`", "`rollout.engine.kind: embedded`"),
        Entry("`rollout.max_num_seqs`", "`rollout.engine.max_num_seqs`"),
        Entry(
            "`rollout.gpu_memory_utilization`",
            "no equivalent",
            "the cache has `rollout.engine.max_num_seqs` times `rollout.engine.max_model_len` tokens",
        ),
        Entry("`rollout.free_cache_engine`", "no equivalent: the engine keeps its cache while the trainer works"),
        Entry(
            "`actor.fsdp_config.param_offload`, `actor.fsdp_config.optimizer_offload`",
            "no equivalent: weights and optimizer stay on the device",
        ),
        Entry("`rollout.calculate_log_probs`", "always on"),
        Entry(
            "`data.train_files`, `data.val_files`, `data.prompt_key`",
            "`data.train_path`, `data.eval_path`, `data.prompt_key`",
            "one file each; `data.chat_template: true`",
        ),
        Entry("`data.apply_chat_template_kwargs`", "`data.chat_template_kwargs`", "with `data.chat_template: true`"),
        Entry("`data.train_max_samples`, `data.val_max_samples`", "`data.train_size`, `data.eval_size`"),
        Entry("`data.shuffle`, `data.seed`", "`data.shuffle`, `seed`"),
        Entry(
            "`reward.custom_reward_function.path`, `reward.custom_reward_function.name`",
            "`rollout.environment.import_path`",
            "`module:name`; with `rollout.environment.kind: function`",
            for_each=True,
        ),
        Entry("`data.reward_fn_key`", "no equivalent: one reward for all data"),
        Entry("`reward.num_workers`", "`rollout.environment.workers`"),
        Entry("`reward.reward_model.enable`", "no equivalent"),
        Entry(
            "`rollout.multi_turn.enable`, `rollout.multi_turn.tool_config_path`, `rollout.agent.default_agent_loop`",
            "`rollout.environment.kind: custom`",
            "or `verifiers:<environment>`, or the built-in `calculator`",
            for_each=True,
        ),
        Entry(
            "`rollout.multi_turn.max_assistant_turns`",
            "`rollout.environment.args`",
            "set by the environment; `calculator` has `max_turns`",
        ),
    ),
)

ALGORITHM = Table(
    SYSTEM,
    (
        Entry("`actor.policy_loss.loss_mode: vanilla`", "`algorithm.loss.kind: ppo_clip`"),
        Entry("`actor.policy_loss.loss_mode: gspo`", "`algorithm.loss.kind: gspo`"),
        Entry(
            "`actor.policy_loss.loss_mode: cispo`",
            "`algorithm.loss.kind: cispo`",
            "bounds 1 - low and 1 + high in both; ours has no lower bound unless you set one",
        ),
        Entry("`actor.policy_loss.loss_mode: gpg`", "`algorithm.loss.kind: reinforce`"),
        Entry("`actor.policy_loss.loss_mode: clip_cov`, `kl_cov`, `geo_mean`, `sapo`", "no equivalent"),
        Entry("`actor.loss_agg_mode: token-mean`", "`algorithm.loss.aggregation: token_mean`"),
        Entry("`actor.loss_agg_mode: seq-mean-token-mean`", "`algorithm.loss.aggregation: sequence_mean`"),
        Entry(
            "`actor.loss_agg_mode: seq-mean-token-sum-norm`",
            "`algorithm.loss.aggregation: token_sum_norm`",
            "`algorithm.loss.constant_length` is their `loss_scale_factor`",
        ),
        Entry(
            "`actor.loss_agg_mode: seq-mean-token-sum`",
            "`algorithm.loss.constant_length: 1`",
            "with `algorithm.loss.aggregation: token_sum_norm`",
        ),
        Entry(
            "`actor.clip_ratio_low`, `actor.clip_ratio_high`",
            "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`",
        ),
        Entry(
            "`actor.clip_ratio`",
            "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`",
            "there is no shared setting: set both",
        ),
        Entry("`actor.clip_ratio_c`", "`algorithm.loss.dual_clip`", "theirs is always on"),
        Entry("`actor.entropy_coeff`", "`algorithm.entropy_coefficient`"),
        Entry(
            "`actor.use_kl_loss`, `actor.kl_loss_coef`",
            "`algorithm.kl.coefficient`",
            "with `algorithm.kl.place: loss`, the default",
            for_each=True,
        ),
        Entry(
            "`actor.kl_loss_type: low_var_kl`, `mse`",
            "`algorithm.kl.estimator: k3`, `algorithm.kl.estimator: k2`",
            "theirs clamps k3 to 10",
        ),
        Entry(
            "`actor.kl_loss_type: kl`, `abs`, `k3+`",
            "no equivalent",
            "as a loss, k1 (`kl`) has a gradient with zero mean and is rejected; `k3+` has the gradient of k2",
        ),
        Entry(
            "`algorithm.use_kl_in_reward`, `algorithm.kl_ctrl.kl_coef`",
            "`algorithm.kl.place: reward`, `algorithm.kl.coefficient`",
            "needs `algorithm.kl.estimator: k1`; with `grpo` or `rloo` theirs is normalised with the group's mean and "
            "deviation, ours is subtracted from each token's advantage afterwards",
        ),
        Entry("`algorithm.kl_ctrl.type: adaptive`", "no equivalent"),
        Entry(
            "`algorithm.adv_estimator: grpo`",
            "`algorithm.advantage.kind: grpo`",
            "`algorithm.advantage.epsilon` is 1e-6 there",
        ),
        Entry("`algorithm.norm_adv_by_std_in_grpo`", "`algorithm.advantage.normalize_std`"),
        Entry("`algorithm.adv_estimator: rloo`", "`algorithm.advantage.kind: rloo`"),
        Entry(
            "`algorithm.adv_estimator: reinforce_plus_plus`",
            "`algorithm.advantage.kind: reinforce_pp`",
            "`gamma` is 1; needs the whole batch",
        ),
        Entry(
            "`algorithm.adv_estimator: reinforce_plus_plus_baseline`",
            "`algorithm.advantage.kind: reinforce_pp_baseline`",
            "needs the whole batch",
        ),
        Entry(
            "`algorithm.adv_estimator: gae`, `remax`, `opo`, `grpo_passk`, `gdpo`",
            "no equivalent",
            "there is no critic",
        ),
        Entry(
            "`algorithm.filter_groups.enable`",
            "`algorithm.dynamic_sampling.enabled`",
            "looks at the scaled and clipped reward, before any length penalty; `metric` has no equivalent",
        ),
        Entry(
            "`algorithm.filter_groups.max_num_gen_batches`",
            "`algorithm.dynamic_sampling.max_filtered_per_step`",
            "batches there, groups here; `algorithm.dynamic_sampling.on_limit: stop` ends the run as theirs does",
        ),
        Entry("`data.gen_batch_size`", "no equivalent: groups are replaced one by one"),
        Entry(
            "`reward.reward_manager.name: dapo`, `reward.reward_kwargs.overlong_buffer_cfg.enable`",
            "`algorithm.reward.overlong: soft`",
            "the limit is `rollout.sampling.max_new_tokens`",
            for_each=True,
        ),
        Entry(
            "`reward.reward_kwargs.overlong_buffer_cfg.len`, `reward.reward_kwargs.overlong_buffer_cfg.penalty_factor`",
            "`algorithm.reward.overlong_buffer`, `algorithm.reward.overlong_penalty`",
        ),
        Entry(
            "`actor.optim.lr`, `actor.optim.weight_decay`, `actor.optim.betas`",
            "`training.optimizer.lr`, `training.optimizer.weight_decay`, `training.optimizer.betas`",
        ),
        Entry(
            "`actor.optim.lr_scheduler_type`, `actor.optim.min_lr_ratio`",
            "`training.optimizer.schedule`, `training.optimizer.final_lr_ratio`",
        ),
        Entry("`actor.optim.lr_warmup_steps`", "`training.optimizer.warmup_steps`", "steps only, no ratio"),
        Entry("`actor.optim.clip_grad`, `actor.grad_clip`", "`training.optimizer.max_grad_norm`"),
    ),
)

STALENESS = Table(
    SYSTEM,
    (
        Entry("`algorithm.rollout_correction.bypass_mode: true`", "`algorithm.old_policy: engine`"),
        Entry(
            "`algorithm.rollout_correction.loss_type: reinforce`",
            "`algorithm.loss.kind: reinforce`",
            "with `algorithm.correction.kind: tis`",
        ),
        Entry(
            "`algorithm.rollout_correction.rollout_is: token`",
            "`algorithm.correction.kind: tis`",
            "`algorithm.correction.cap` is their `rollout_is_threshold`",
        ),
        Entry(
            "`algorithm.rollout_correction.rollout_is_threshold: 0.5_5.0`",
            "`algorithm.correction.kind: icepop`",
            "`algorithm.correction.low`, `algorithm.correction.high`",
        ),
        Entry(
            "`algorithm.rollout_correction.rollout_is: sequence`",
            "no equivalent",
            "`sequence_masked` drops responses instead of capping their weight",
        ),
        Entry(
            "`algorithm.rollout_correction.rollout_rs: seq_sum_k1`, `seq_mean_k1`",
            "`algorithm.correction.kind: sequence_masked`",
            "`algorithm.correction.mean`: `sum` and `geometric`; ours weights the responses it keeps by the same ratio",
            for_each=("with `algorithm.correction.mean: sum`", "with `algorithm.correction.mean: geometric`"),
        ),
        Entry(
            "other values of `algorithm.rollout_correction.rollout_rs`, "
            "`algorithm.rollout_correction.rollout_is_batch_normalize`",
            "no equivalent",
        ),
        Entry("`trainer.v1.trainer_mode: sync`", "`staleness.policy: on_policy`", "ours streams inside the step"),
        Entry(
            "`trainer.v1.trainer_mode: colocate_async`, `separate_async`",
            "`staleness.policy: windowed`",
            "the policy does not decide where things run",
            for_each=True,
        ),
        Entry(
            "`trainer.v1.sampler.max_off_policy_threshold`",
            "`staleness.max_staleness`",
            "both count versions from the start of generation to training; 8 by default there",
        ),
        Entry(
            "`trainer.v1.sampler.max_off_policy_strategy: drop`",
            "always",
            "the prompt is dispatched again, before any new one",
        ),
        Entry(
            "`trainer.v1.sampler.max_off_policy_strategy: wait`",
            "`staleness.policy: weight_fifo`",
            "the closest: it waits for the oldest version in the window",
        ),
        Entry("one-step-off-policy trainer", "`staleness.policy: in_order`", "`staleness.lookahead: 1`"),
        Entry(
            "`async_training.staleness_threshold`",
            "`staleness.max_staleness`",
            "a fraction of stale samples there, versions here: 0 is 0, 1 is about 1, nothing in between",
        ),
        Entry(
            "`async_training.trigger_parameter_sync_step`, `async_training.require_batches`",
            "`training.minibatches_per_step`",
            "their product: one of our steps is the work between two weight updates of the engine. With more than "
            "one update, a step waits for all of its groups",
        ),
        Entry(
            "`async_training.partial_rollout`",
            "`weight_sync.mode: in_flight`",
            "without it: `weight_sync.mode: drain`. The cache: `weight_sync.kv_cache`",
        ),
    ),
)

RECORDS = Table(
    SYSTEM,
    (
        Entry("`trainer.default_local_dir`", "`run_dir`"),
        Entry(
            "`trainer.save_freq`, `trainer.max_actor_ckpt_to_keep`",
            "`checkpoint.every_steps`, `checkpoint.keep_latest`",
            "a model folder for transformers, no merging",
        ),
        Entry(
            "`trainer.resume_mode`",
            "`penstock resume RUN_DIR`",
            "from the newest complete checkpoint, or `--checkpoint step_N`",
        ),
        Entry(
            "`trainer.logger`",
            "`observe.tensorboard: {}`, `observe.wandb: {}`, `observe.mlflow: {}`",
            "`metrics.jsonl` is always written",
        ),
        Entry("`trainer.project_name`, `trainer.experiment_name`", "`observe.wandb.project`, `observe.wandb.name`"),
        Entry("`trainer.rollout_data_dir`", "`observe.samples_per_step`", "`samples.jsonl`"),
        Entry("`rollout.prometheus.enable`", "`observe.prometheus: {}`"),
        Entry(
            "`trainer.val_before_train`, `trainer.test_freq`",
            "`eval.at_start`, `eval.every_steps`",
            "and `eval.at_end`",
        ),
        Entry("`trainer.val_only`", "`penstock eval`"),
        Entry(
            "`rollout.val_kwargs.do_sample`, `rollout.val_kwargs.n`",
            "`eval.greedy`, `eval.samples_per_prompt`",
            "sampled as in training",
        ),
    ),
)

DEFAULTS = Defaults(
    SYSTEM,
    (
        Default("`algorithm.adv_estimator`", "`gae`", "algorithm.advantage.kind"),
        Default("`actor.clip_ratio_c`", "`3.0`", "algorithm.loss.dual_clip", "no bound"),
        Default("`data.train_batch_size`", "`1024`", "training.prompt_groups_per_step"),
        Default("`actor.ppo_mini_batch_size`", "`256`: 4 updates", "training.minibatches_per_step"),
        Default("`rollout.n`", "`1`", "rollout.group_size"),
        Default("`data.max_response_length`", "`512`", "rollout.sampling.max_new_tokens"),
        Default("`trainer.total_epochs`", "`30`", "data.epochs"),
        Default("`actor.optim.weight_decay`", "`0.01`", "training.optimizer.weight_decay"),
        Default("`model.enable_gradient_checkpointing`", "`true`", "training.gradient_checkpointing"),
        Default("`model.use_remove_padding`", "`true`", "training.batching"),
        Default("`model.lora_alpha`", "`16`", "model.lora.alpha"),
    ),
)

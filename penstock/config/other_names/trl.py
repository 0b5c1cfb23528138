"""Names of TRL: `GRPOConfig`, `GRPOTrainer` and `AsyncGRPOConfig`."""

from __future__ import annotations

from penstock.config.other_names.entries import Default, Defaults, Entry, Table

SYSTEM = "TRL"

MODEL = Table(
    SYSTEM,
    (
        Entry(
            "`GRPOTrainer(model)`",
            "`model.path`",
            "a hub id needs `model.download: true`, unless it is in the local cache",
        ),
        Entry(
            "`model_init_kwargs`",
            "`model.dtype`, `model.attn_implementation`",
            "its `dtype` and `attn_implementation` (`sdpa` or `eager`); the other entries have no equivalent",
        ),
        Entry(
            "`bf16`",
            "`model.dtype: bfloat16`",
            "theirs computes float32 weights in bfloat16 (autocast); ours holds bfloat16 weights, with a float32 "
            "copy in the optimizer",
        ),
        Entry("`trust_remote_code`", "`model.trust_remote_code`"),
        Entry("`gradient_checkpointing`", "`training.gradient_checkpointing`"),
        Entry(
            "`GRPOTrainer(peft_config)`",
            "`model.lora`",
            "adding the section `model.lora` turns LoRA on; no dropout, no quantised base model",
        ),
        Entry(
            "`ModelConfig.lora_r`, `ModelConfig.lora_alpha`, `ModelConfig.lora_target_modules`",
            "`model.lora.rank`, `model.lora.alpha`, `model.lora.target_modules`",
        ),
        Entry("`num_generations`", "`rollout.group_size`"),
        Entry("`generation_batch_size`", "`training.prompt_groups_per_step`", "theirs divided by `num_generations`"),
        Entry(
            "`steps_per_generation`, `gradient_accumulation_steps`",
            "`training.minibatches_per_step`",
            "the first divided by the second",
            for_each=("divided by `gradient_accumulation_steps`", "their `steps_per_generation` divided by it"),
        ),
        Entry(
            "`per_device_train_batch_size`",
            "`training.max_tokens_per_microbatch`",
            "rows there, tokens here; no effect on the result",
        ),
        Entry(
            "`num_iterations`",
            "no equivalent: a group is trained once",
            "above 1, theirs trains on the batch again",
        ),
        Entry("`max_steps`", "`training.max_steps`", "updates there, steps here"),
        Entry("`num_train_epochs`", "`data.epochs`"),
    ),
)

GENERATION = Table(
    SYSTEM,
    (
        Entry(
            "`max_completion_length`",
            "`rollout.sampling.max_new_tokens`",
            "per turn, in a multi-turn environment",
        ),
        Entry(
            "`vllm_max_model_length`",
            "`rollout.engine.max_model_len`",
            "prompt and response together; `data.overlong` decides what happens to prompts that do not fit",
        ),
        Entry(
            "`temperature`, `top_p`, `top_k`, `min_p`",
            "`rollout.sampling.temperature`, `rollout.sampling.top_p`, `rollout.sampling.top_k`, "
            "`rollout.sampling.min_p`",
            "with any of the last three, the trainer normalises log-probs over the kept tokens; theirs over all tokens",
            for_each=("", *3 * ("the trainer normalises log-probs over the kept tokens; theirs over all tokens",)),
        ),
        Entry("`repetition_penalty`", "no equivalent"),
        Entry(
            "`generation_kwargs`",
            "`rollout.sampling.stop`",
            "for its `stop`; rewards see the stop string in both. Its other entries have no equivalent",
        ),
        Entry(
            "`chat_template_kwargs`",
            "`data.chat_template_kwargs`",
            "with `data.chat_template: true`; variables that the template does not read are rejected",
        ),
        Entry(
            "`use_vllm`, `vllm_mode`",
            "no equivalent yet: there is no vLLM, and embedded is the only engine",
            "`rollout.engine.max_num_seqs` requests decode at the same time",
        ),
        Entry("`use_transformers_continuous_batching`", "always on", "in the engine `embedded`"),
        Entry(
            "`vllm_gpu_memory_utilization`",
            "no equivalent: the cache has a fixed size",
            "`rollout.engine.max_num_seqs` times `rollout.engine.max_model_len` tokens",
        ),
        Entry("`vllm_tensor_parallel_size`", "no equivalent yet: one process, one device"),
        Entry(
            "`GRPOTrainer(train_dataset)`, `GRPOTrainer(eval_dataset)`",
            "`data.train_path`, `data.eval_path`",
            "JSONL, Parquet, or what `datasets` loads; columns by `data.prompt_key`, `data.answer_key`; chats need "
            "`data.chat_template: true`",
        ),
        Entry("`shuffle_dataset`, `seed`", "`data.shuffle`, `seed`"),
        Entry(
            "`GRPOTrainer(reward_funcs)`, `reward_weights`",
            "`rollout.environment.rewards`",
            "with `rollout.environment.kind: function`; each has a weight; a reward model has no equivalent",
            for_each=True,
        ),
        Entry(
            "`multi_objective_aggregation`",
            "no equivalent: rewards are summed before they are normalised",
            "theirs can normalise the rewards of each function first (GDPO)",
        ),
        Entry(
            "`GRPOTrainer(tools)`, `GRPOTrainer(environment_factory)`, `max_tool_calling_iterations`",
            "`rollout.environment.kind: custom`",
            "or `verifiers:<environment>`, or the built-in `calculator`; turns are limited by the environment",
            for_each=True,
        ),
    ),
)

ALGORITHM = Table(
    SYSTEM,
    (
        Entry("`loss_type: dapo`", "`algorithm.loss.aggregation: token_mean`"),
        Entry(
            "`loss_type: grpo`",
            "`algorithm.loss.aggregation: sequence_mean`",
            "masked responses count in their mean but not in ours",
        ),
        Entry(
            "`loss_type: dr_grpo`",
            "`algorithm.loss.aggregation: token_sum_norm`",
            "`algorithm.loss.constant_length` is their `max_completion_length`; masked responses count in their mean "
            "but not in ours",
        ),
        Entry(
            "`loss_type: bnpo`",
            "no equivalent: nothing depends on the microbatch",
            "closest is `algorithm.loss.aggregation: token_mean`",
        ),
        Entry(
            "`loss_type: cispo`",
            "`algorithm.loss.kind: cispo`",
            "their bound is `epsilon_high`, ours 1 + `algorithm.loss.clip_ratio_high`: 5.0 there is 4.0 here",
        ),
        Entry("`loss_type: sapo`, `loss_type: luspo`, `loss_type: vespo`", "no equivalent"),
        Entry(
            "`importance_sampling_level: sequence`",
            "`algorithm.loss.kind: gspo`",
            "with `loss_type: grpo`, as in the paper; clip ranges have a different scale and different defaults",
        ),
        Entry(
            "`epsilon`, `epsilon_high`",
            "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`",
            "ours are independent: set both. With one update per step the ratio is 1 and neither clips, "
            "unless `algorithm.old_policy: engine`",
            for_each=True,
        ),
        Entry("`delta`", "`algorithm.loss.dual_clip`", "the same bound on tokens with a negative advantage"),
        Entry("`scale_rewards: group`", "`algorithm.advantage.kind: grpo`", "same standard deviation and epsilon"),
        Entry("`scale_rewards: none`", "`algorithm.advantage.normalize_std: false`"),
        Entry(
            "`scale_rewards: batch`",
            "no equivalent",
            "closest is `algorithm.advantage.kind: reinforce_pp_baseline`, with the standard deviation over tokens",
        ),
        Entry(
            "`beta`",
            "`algorithm.kl.coefficient`",
            "the estimator is k3 in both; `algorithm.kl.place: reward` has no counterpart there",
        ),
        Entry(
            "`use_bias_correction_kl`",
            "no equivalent: ours behaves as theirs does when it is off",
            "theirs multiplies the penalty by the ratio, which changes its gradient even on-policy",
        ),
        Entry("`sync_ref_model`, `ref_model_mixup_alpha`", "no equivalent: the reference is the model at the start"),
        Entry(
            "`entropy_coef`",
            "`algorithm.entropy_coefficient`",
            "theirs is a mean over tokens for every `loss_type`; ours is weighted like the loss",
        ),
        Entry("`use_adaptive_entropy`, `top_entropy_quantile`, `off_policy_mask_threshold`", "no equivalent"),
        Entry(
            "`mask_truncated_completions`",
            "`algorithm.reward.overlong: mask`",
            "in both, the rewards of masked responses still count in the group's mean",
        ),
        Entry(
            "no setting",
            "`algorithm.reward.overlong: soft`, `algorithm.dynamic_sampling.enabled: true`",
            "DAPO's length penalty and dynamic sampling",
        ),
        Entry(
            "`learning_rate`, `weight_decay`, `adam_epsilon`",
            "`training.optimizer.lr`, `training.optimizer.weight_decay`, `training.optimizer.eps`",
            "AdamW is the only optimizer",
        ),
        Entry("`adam_beta1`, `adam_beta2`", "`training.optimizer.betas`", "one list with both values", for_each=True),
        Entry(
            "`lr_scheduler_type`, `warmup_steps`",
            "`training.optimizer.schedule`, `training.optimizer.warmup_steps`",
            "whole steps, not a share of the run; a decaying schedule needs `training.max_steps`",
        ),
        Entry("`max_grad_norm`", "`training.optimizer.max_grad_norm`"),
    ),
)

STALENESS = Table(
    SYSTEM,
    (
        Entry("`vllm_importance_sampling_correction: False`", "`algorithm.correction.kind: none`"),
        Entry(
            "`vllm_importance_sampling_mode: token_truncate`",
            "`algorithm.correction.kind: tis`",
            "`algorithm.correction.cap` is `vllm_importance_sampling_clip_max`; no lower bound",
        ),
        Entry(
            "`vllm_importance_sampling_mode: token_mask`",
            "`algorithm.correction.kind: icepop`",
            "bounds `algorithm.correction.low`, `algorithm.correction.high`; without "
            "`vllm_importance_sampling_clip_min` it is `decoupled` with a cap",
        ),
        Entry("`vllm_importance_sampling_mode: sequence_mask`", "`algorithm.correction.kind: sequence_masked`"),
        Entry(
            "`vllm_importance_sampling_mode: sequence_truncate`",
            "no equivalent",
            "`sequence_masked` drops responses instead of capping their weight",
        ),
        Entry(
            "`AsyncGRPOConfig.max_staleness`",
            "`staleness.max_staleness`",
            "with `staleness.policy: windowed`; counted per sample there, per group here",
        ),
        Entry(
            "`AsyncGRPOConfig.max_inflight_tasks`, `AsyncGRPOConfig.queue_maxsize`",
            "`rollout.max_inflight_groups`, `buffer.max_buffered_groups`",
            "requests and samples there, groups here",
        ),
        Entry("`AsyncGRPOConfig.weight_sync_steps`", "no equivalent: weights go out after every step"),
        Entry(
            "`AsyncGRPOConfig.token_budget`",
            "`training.max_tokens_per_microbatch`",
            "a longer row is trained alone, not dropped",
        ),
        Entry("`AsyncGRPOConfig.request_timeout`", "`rollout.generation_timeout_seconds`"),
        Entry(
            "always",
            "`algorithm.old_policy: engine`",
            "their asynchronous loss uses the engine's log-probs in the ratio",
        ),
    ),
)

RECORDS = Table(
    SYSTEM,
    (
        Entry("`output_dir`", "`run_dir`"),
        Entry(
            "`save_steps`, `save_total_limit`",
            "`checkpoint.every_steps`, `checkpoint.keep_latest`",
            "a checkpoint is a model folder for transformers",
        ),
        Entry(
            "`resume_from_checkpoint`",
            "`penstock resume RUN_DIR`",
            "prompts in flight are dispatched again; none is skipped or repeated",
        ),
        Entry(
            "`report_to`",
            "`observe.tensorboard: {}`, `observe.wandb: {}`, `observe.mlflow: {}`",
            "`observe.wandb.project`, `observe.wandb.name`; offline unless `observe.wandb.mode: online`",
        ),
        Entry("`logging_steps`", "no equivalent: every step is recorded", "in `metrics.jsonl`"),
        Entry("`log_completions`, `num_completions_to_print`", "`observe.samples_per_step`", "into `samples.jsonl`"),
        Entry(
            "`eval_strategy`",
            "`eval.at_start`, `eval.every_steps`, `eval.at_end`",
            "rollouts continue during an evaluation; `penstock eval` evaluates a checkpoint",
        ),
        Entry("`eval_steps`", "`eval.every_steps`"),
        Entry(
            "`num_generations_eval`",
            "`eval.samples_per_prompt`",
            "needs `eval.greedy: false` above 1; `eval.pass_at` gives pass@k",
        ),
    ),
)

DEFAULTS = Defaults(
    SYSTEM,
    (
        Default("`max_completion_length`", "`512`", "rollout.sampling.max_new_tokens"),
        Default("`lr_scheduler_type`", "`linear`", "training.optimizer.schedule"),
        Default("`num_train_epochs`", "`3.0`", "data.epochs"),
        Default("`gradient_checkpointing`", "`true`", "training.gradient_checkpointing"),
        Default("`vllm_importance_sampling_mode`", "`sequence_mask`", "algorithm.correction.kind"),
        Default("`vllm_importance_sampling_clip_max`", "`3.0`"),
        Default("`use_bias_correction_kl`", "`true`"),
        Default(
            "`save_steps`",
            "`500`",
            "checkpoint.every_steps",
            "every 10 minutes (`checkpoint.every_minutes`) and at the end",
        ),
        Default("`save_total_limit`", "nothing: all", "checkpoint.keep_latest"),
        Default("`eval_strategy`", "`no`", "eval.at_start"),
        Default("`seed`", "`42`", "seed"),
    ),
)

"""Names of prime-rl, and those of AReaL's staleness settings."""

from __future__ import annotations

from penstock.config.other_names.rows import Row, Table

PRIME_RL = Table(
    "prime-rl",
    (
        Row("`model.name`", "`model.path`"),
        Row("`trainer.model.attn`", "`model.attn_implementation`", "`sdpa` or `eager`; no flash attention"),
        Row("`trainer.model.ac`", "`training.gradient_checkpointing`", "for every layer"),
        Row(
            "`trainer.model.lora.rank`, `trainer.model.lora.alpha`, `trainer.model.lora.target_modules`",
            "`model.lora.rank`, `model.lora.alpha`, `model.lora.target_modules`",
            "no dropout",
        ),
        Row(
            "`orchestrator.group_size`, `orchestrator.batch_size`",
            "`rollout.group_size`, `training.prompt_groups_per_step`",
            "their batch counts responses",
            for_each=("", "their batch counts responses; ours is theirs divided by the group size"),
        ),
        Row("`orchestrator.rollouts_per_example`", "`rollout.group_size`", "what some versions call `group_size`"),
        Row("`trainer.max_steps`, `orchestrator.max_steps`", "`training.max_steps`"),
        Row("`orchestrator.token_batch_size`", "no equivalent: a step is a number of groups"),
        Row("`orchestrator.max_inflight_rollouts`", "`rollout.max_inflight_groups`", "responses there, groups here"),
        Row("`orchestrator.oversampling_factor`", "`rollout.max_inflight_groups`", "theirs is a multiple of the batch"),
        Row(
            "`orchestrator.max_off_policy_steps`",
            "`staleness.max_staleness`",
            "with `staleness.policy: windowed` and `weight_sync.mode: abort_stale`",
        ),
        Row(
            "`max_async_level` (older versions)",
            "`staleness.lookahead`",
            "with `staleness.policy: in_order`: how far generation may run ahead",
        ),
        Row(
            "`seq_len`",
            "`rollout.engine.max_model_len`",
            "prompt and response together; `data.overlong` decides what happens to prompts that do not fit",
        ),
        Row(
            "`orchestrator.sampling.max_tokens`, `orchestrator.sampling.temperature`",
            "`rollout.sampling.max_new_tokens`, `rollout.sampling.temperature`",
            "per turn, in a multi-turn environment",
        ),
        Row(
            "`orchestrator.sampling.temp_scheduler`, `orchestrator.sampling.repetition_penalty`, "
            "`orchestrator.sampling.min_tokens`",
            "no equivalent",
        ),
        Row("`orchestrator.env`", "`rollout.environment.kind`", "`verifiers:<environment>`; one environment per run"),
        Row(
            "`orchestrator.buffer.online_difficulty_filtering`",
            "`algorithm.dynamic_sampling.enabled`",
            "theirs drops groups with a mean reward of 0 or 1, ours drops groups whose rewards are all the same",
        ),
        Row(
            "`trainer.loss.import_path`, `trainer.loss.kwargs`",
            "`algorithm.loss.import_path`, `algorithm.loss.args`",
            "with `algorithm.loss.kind: custom`; `module:callable` here",
            for_each=(
                "with `algorithm.loss.kind: custom`; `module:callable` here",
                "with `algorithm.loss.kind: custom`",
            ),
        ),
        Row(
            "`orchestrator.advantage.import_path`, `orchestrator.advantage.kwargs`",
            "`algorithm.advantage.import_path`, `algorithm.advantage.args`",
            "with `algorithm.advantage.kind: custom`; `module:callable` here",
            for_each=(
                "with `algorithm.advantage.kind: custom`; `module:callable` here",
                "with `algorithm.advantage.kind: custom`",
            ),
        ),
        Row(
            "`trainer.optim.lr`, `trainer.optim.weight_decay`, `trainer.optim.max_norm`",
            "`training.optimizer.lr`, `training.optimizer.weight_decay`, `training.optimizer.max_grad_norm`",
            "AdamW is the only optimizer",
        ),
        Row(
            "`trainer.optim.betas1`, `trainer.optim.betas2`",
            "`training.optimizer.betas`",
            "one list with both values",
            for_each=True,
        ),
        Row(
            "`trainer.scheduler.type`, `trainer.scheduler.warmup_steps`",
            "`training.optimizer.schedule`, `training.optimizer.warmup_steps`",
        ),
        Row(
            "`trainer.scheduler.min_lr`",
            "`training.optimizer.final_lr_ratio`",
            "a learning rate there, a fraction of the peak here",
        ),
        Row("`ckpt.interval`, `ckpt.keep_last`", "`checkpoint.every_steps`, `checkpoint.keep_latest`"),
        Row("`ckpt.resume_step`", "`penstock resume RUN_DIR`", "`--checkpoint step_N` picks an older one"),
        Row(
            "`orchestrator.eval.interval`, `orchestrator.eval.num_examples`, "
            "`orchestrator.eval.rollouts_per_example`, `orchestrator.eval.eval_base_model`",
            "`eval.every_steps`, `data.eval_size`, `eval.samples_per_prompt`, `eval.at_start`",
        ),
        Row("`wandb.project`, `wandb.name`", "`observe.wandb.project`, `observe.wandb.name`"),
        Row("`trainer.metrics_server`", "`observe.prometheus: {}`"),
        Row("`output_dir`", "`run_dir`"),
    ),
)

AREAL = Table(
    "AReaL",
    (
        Row(
            "`rollout.max_head_offpolicyness`",
            "`staleness.max_staleness`",
            "with `staleness.policy: windowed`; 0 is `on_policy`",
        ),
        Row("`rollout.max_concurrent_rollouts`", "`rollout.max_inflight_groups`"),
        Row("`actor.use_decoupled_loss`", "`algorithm.correction.kind: decoupled`"),
        Row(
            "`actor.behave_imp_weight_cap`",
            "`algorithm.correction.cap`",
            "5.0 by default there, no cap here; `token_mask` is their default mode and our only one",
        ),
    ),
)

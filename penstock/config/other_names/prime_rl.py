"""Names of prime-rl, and those of AReaL's staleness settings."""

from __future__ import annotations

from penstock.config.other_names.entries import Entry, Table

PRIME_RL = Table(
    "prime-rl",
    (
        Entry("`model.name`", "`model.path`"),
        Entry("`trainer.model.attn`", "`model.attn_implementation`", "`sdpa` or `eager`; no flash attention"),
        Entry("`trainer.model.ac`", "`training.gradient_checkpointing`", "for every layer"),
        Entry(
            "`trainer.model.lora.rank`, `trainer.model.lora.alpha`, `trainer.model.lora.target_modules`",
            "`model.lora.rank`, `model.lora.alpha`, `model.lora.target_modules`",
            "no dropout",
        ),
        Entry(
            "`orchestrator.group_size`, `orchestrator.batch_size`",
            "`rollout.group_size`, `training.prompt_groups_per_step`",
            "their batch counts responses",
            for_each=("", "their batch counts responses; ours is theirs divided by the group size"),
        ),
        Entry("`orchestrator.rollouts_per_example`", "`rollout.group_size`", "what some versions call `group_size`"),
        Entry("`trainer.max_steps`, `orchestrator.max_steps`", "`training.max_steps`"),
        Entry("`orchestrator.token_batch_size`", "no equivalent: a step is a number of groups"),
        Entry("`orchestrator.max_inflight_rollouts`", "`rollout.max_inflight_groups`", "responses there, groups here"),
        Entry(
            "`orchestrator.oversampling_factor`", "`rollout.max_inflight_groups`", "theirs is a multiple of the batch"
        ),
        Entry(
            "`orchestrator.max_off_policy_steps`",
            "`staleness.max_staleness`",
            "with `staleness.policy: windowed` and `weight_sync.mode: abort_stale`",
        ),
        Entry(
            "`max_async_level` (older versions)",
            "`staleness.lookahead`",
            "with `staleness.policy: in_order`: how far generation may run ahead",
        ),
        Entry(
            "`seq_len`",
            "`rollout.engine.max_model_len`",
            "prompt and response together; `data.overlong` decides what happens to prompts that do not fit",
        ),
        Entry(
            "`orchestrator.sampling.max_tokens`, `orchestrator.sampling.temperature`",
            "`rollout.sampling.max_new_tokens`, `rollout.sampling.temperature`",
            "per turn, in a multi-turn environment",
        ),
        Entry(
            "`orchestrator.sampling.temp_scheduler`, `orchestrator.sampling.repetition_penalty`, "
            "`orchestrator.sampling.min_tokens`",
            "no equivalent",
        ),
        Entry("`orchestrator.env`", "`rollout.environment.kind`", "`verifiers:<environment>`; one environment per run"),
        Entry(
            "`orchestrator.buffer.online_difficulty_filtering`",
            "`algorithm.dynamic_sampling.enabled`",
            "theirs drops groups with a mean reward of 0 or 1, ours drops groups whose rewards are all the same",
        ),
        Entry(
            "`trainer.loss.import_path`, `trainer.loss.kwargs`",
            "`algorithm.loss.import_path`, `algorithm.loss.args`",
            "with `algorithm.loss.kind: custom`; `module:callable` here",
            for_each=(
                "with `algorithm.loss.kind: custom`; `module:callable` here",
                "with `algorithm.loss.kind: custom`",
            ),
        ),
        Entry(
            "`orchestrator.advantage.import_path`, `orchestrator.advantage.kwargs`",
            "`algorithm.advantage.import_path`, `algorithm.advantage.args`",
            "with `algorithm.advantage.kind: custom`; `module:callable` here",
            for_each=(
                "with `algorithm.advantage.kind: custom`; `module:callable` here",
                "with `algorithm.advantage.kind: custom`",
            ),
        ),
        Entry(
            "`trainer.optim.lr`, `trainer.optim.weight_decay`, `trainer.optim.max_norm`",
            "`training.optimizer.lr`, `training.optimizer.weight_decay`, `training.optimizer.max_grad_norm`",
            "AdamW is the only optimizer",
        ),
        Entry(
            "`trainer.optim.betas1`, `trainer.optim.betas2`",
            "`training.optimizer.betas`",
            "one list with both values",
            for_each=True,
        ),
        Entry(
            "`trainer.scheduler.type`, `trainer.scheduler.warmup_steps`",
            "`training.optimizer.schedule`, `training.optimizer.warmup_steps`",
        ),
        Entry(
            "`trainer.scheduler.min_lr`",
            "`training.optimizer.final_lr_ratio`",
            "a learning rate there, a fraction of the peak here",
        ),
        Entry("`ckpt.interval`, `ckpt.keep_last`", "`checkpoint.every_steps`, `checkpoint.keep_latest`"),
        Entry("`ckpt.resume_step`", "`penstock resume RUN_DIR`", "`--checkpoint step_N` picks an older one"),
        Entry(
            "`orchestrator.eval.interval`, `orchestrator.eval.num_examples`, "
            "`orchestrator.eval.rollouts_per_example`, `orchestrator.eval.eval_base_model`",
            "`eval.every_steps`, `data.eval_size`, `eval.samples_per_prompt`, `eval.at_start`",
        ),
        Entry("`wandb.project`, `wandb.name`", "`observe.wandb.project`, `observe.wandb.name`"),
        Entry("`trainer.metrics_server`", "`observe.prometheus: {}`"),
        Entry("`output_dir`", "`run_dir`"),
    ),
)

AREAL = Table(
    "AReaL",
    (
        Entry(
            "`rollout.max_head_offpolicyness`",
            "`staleness.max_staleness`",
            "with `staleness.policy: windowed`; 0 is `on_policy`",
        ),
        Entry("`rollout.max_concurrent_rollouts`", "`rollout.max_inflight_groups`"),
        Entry("`actor.use_decoupled_loss`", "`algorithm.correction.kind: decoupled`"),
        Entry(
            "`actor.behave_imp_weight_cap`",
            "`algorithm.correction.cap`",
            "5.0 by default there, no cap here; `token_mask` is their default mode and our only one",
        ),
    ),
)

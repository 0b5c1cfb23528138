"""Rules between settings of different sections, each a line that names the keys, the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from penstock.config.rules.algorithm import algorithm_rules, idle_algorithm_settings
from penstock.config.rules.environment import environment_rules, idle_environment_settings
from penstock.config.rules.eval import eval_rules, idle_eval_settings
from penstock.config.rules.recording import recording_rules

if TYPE_CHECKING:
    from penstock.config.models import RunConfig

_NEVER_ABORTS = ("in_order", "weight_fifo", "ready_first")
_FALLING = ("linear", "cosine")


def contradictions(config: RunConfig) -> list[str]:
    """Every pair of settings that cannot both be honoured, as `key: reason` lines; empty when there is none."""
    return [
        *_staleness_rules(config),
        *algorithm_rules(config),
        *_deterministic_rules(config),
        *environment_rules(config),
        *eval_rules(config),
        *recording_rules(config),
        *_section_rules(config),
        *_process_rules(config),
        *(f"{key}: {reason}" for key, reason in idle_settings(config).items() if _is_set(config, key)),
    ]


def idle_settings(config: RunConfig) -> dict[str, str]:
    """Settings that have no effect alongside the others, with the reason: an error when set, left out of a dump."""
    idle = {}
    if config.staleness.policy == "on_policy":
        idle["weight_sync.kv_cache"] = (
            "has no effect with staleness.policy = on_policy: no request runs while weights change"
        )
    if config.weight_sync.mode == "drain":
        idle["weight_sync.kv_cache"] = "has no effect with mode = drain, where no request is running; remove it"
    if config.rollout.failure.on_drop == "replace":
        idle["rollout.failure.min_groups_per_step"] = (
            "has no effect with on_drop = replace, where steps stay full; remove it or set on_drop to shrink"
        )
    if config.rollout.replay_from is not None:
        idle["runtime.engine_process"] = "has no effect without an engine (rollout.replay_from); remove it"
    if config.runtime.restarts and config.checkpoint.every_steps is None and config.checkpoint.every_minutes is None:
        idle["runtime.restarts"] = (
            "has no effect without checkpoints to go back to; set checkpoint.every_steps or checkpoint.every_minutes"
        )
    if config.training.backend == "none":
        idle["runtime.trainer_process"] = "has no effect without a trainer (training.backend = none); remove it"
    if config.training.optimizer.schedule == "constant":
        idle["training.optimizer.final_lr_ratio"] = "has no effect with schedule = constant; remove it"
    if config.model.lora is not None and config.model.lora.path is not None:
        for name in ("rank", "alpha", "target_modules"):
            idle[f"model.lora.{name}"] = "comes from the adapter in model.lora.path; remove it"
    if not config.data_plane.observe:
        idle["data_plane.on_event"] = "has no effect with observe = false, where there are no events; remove it"
    if config.data_plane.adapter == "memory":
        for name in ("capacity_gb", "when_full", "full_seconds"):
            idle[f"data_plane.{name}"] = "has no effect with adapter = memory; remove it, or set adapter to shm"
    elif config.data_plane.when_full == "refuse":
        idle["data_plane.full_seconds"] = "has no effect with when_full = refuse, where nothing waits; remove it"
    idle |= idle_environment_settings(config) | idle_algorithm_settings(config) | idle_eval_settings(config)
    return idle


def _is_set(config: RunConfig, key: str) -> bool:
    *sections, name = key.split(".")
    section: BaseModel = config
    for part in sections:
        section = getattr(section, part)
    return name in section.model_fields_set and getattr(section, name) is not None


def _staleness_rules(config: RunConfig) -> Iterator[str]:
    n, chunk = config.training.prompt_groups_per_step, config.training.min_groups_per_chunk
    if chunk > n:
        yield (
            f"training.min_groups_per_chunk: {chunk} is more than training.prompt_groups_per_step = {n}, so no chunk "
            f"would ever be complete; use at most {n}"
        )
    policy = config.staleness.policy
    if (
        policy == "ready_first"
        and config.algorithm.correction.kind == "none"
        and config.algorithm.old_policy == "trainer"
    ):
        yield (
            "staleness.policy: ready_first puts no bound on the lag and needs an off-policy correction; set "
            "algorithm.correction.kind to tis, or choose windowed"
        )
    if config.staleness.policy == "weight_fifo" and config.staleness.lookahead > config.staleness.max_staleness:
        yield (
            f"staleness.lookahead: groups dispatched {config.staleness.lookahead} steps ahead would be too old for "
            f"staleness.max_staleness = {config.staleness.max_staleness} when their step comes; use at most "
            f"{config.staleness.max_staleness}"
        )
    if config.weight_sync.mode == "abort_stale" and policy in _NEVER_ABORTS:
        yield (
            f"weight_sync.mode: abort_stale has nothing to abort with staleness.policy = {policy}, which lets running "
            "groups finish; use in_flight or drain, or the windowed policy"
        )
    failure = config.rollout.failure
    if failure.on_drop == "shrink" and failure.min_groups_per_step > n:
        yield (
            f"rollout.failure.min_groups_per_step: {failure.min_groups_per_step} is more than "
            f"training.prompt_groups_per_step = {n}"
        )
    if failure.on_drop == "shrink" and config.staleness.policy == "windowed" and config.staleness.over_sampling:
        yield (
            "rollout.failure.on_drop: with staleness.over_sampling the next ready group takes a dropped one's place, "
            "so no step shrinks; use replace"
        )


def _deterministic_rules(config: RunConfig) -> Iterator[str]:
    if not config.deterministic:
        return
    if config.staleness.policy != "in_order" or config.staleness.lookahead != 0:
        yield (
            "deterministic: needs staleness.policy = in_order and staleness.lookahead = 0, so that groups train in "
            "order"
        )
    if config.weight_sync.mode != "drain":
        yield "deterministic: needs weight_sync.mode = drain, so that no group sees two weight versions"
    if config.training.max_minutes is not None:
        yield "deterministic: training.max_minutes would make the run end by the clock; use training.max_steps"


def _section_rules(config: RunConfig) -> Iterator[str]:
    if config.rollout.sampling.max_new_tokens >= config.rollout.engine.max_model_len:
        yield (
            f"rollout.sampling.max_new_tokens: {config.rollout.sampling.max_new_tokens} leaves no room for a prompt in "
            f"rollout.engine.max_model_len = {config.rollout.engine.max_model_len}"
        )
    optimizer = config.training.optimizer
    if config.training.max_steps is not None and optimizer.warmup_steps >= config.training.max_steps:
        yield (
            f"training.optimizer.warmup_steps: {optimizer.warmup_steps} warm-up steps do not end before "
            f"training.max_steps = {config.training.max_steps}; use fewer"
        )
    if optimizer.schedule in _FALLING and config.training.max_steps is None:
        yield (
            f"training.max_steps: is needed with training.optimizer.schedule = {optimizer.schedule}, to know when it "
            "ends"
        )


def _process_rules(config: RunConfig) -> Iterator[str]:
    if config.runtime.trainer_process and config.data_plane.adapter == "memory":
        yield (
            "runtime.trainer_process: a trainer in another process cannot read rows that data_plane.adapter = memory "
            "keeps in this one; set data_plane.adapter to shm"
        )

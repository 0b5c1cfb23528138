"""Rules of the mathematics: settings that make no sense beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.models import RunConfig


def algorithm_rules(config: RunConfig) -> Iterator[str]:
    """Combinations of advantage, loss, correction and sampling that would train something else than they say."""
    algorithm, sampling = config.algorithm, config.rollout.sampling
    corrected = algorithm.correction.kind != "none" or algorithm.old_policy == "engine"
    if (sampling.top_p < 1 or sampling.top_k > 0) and not corrected:
        key = "top_p" if sampling.top_p < 1 else "top_k"
        yield (
            f"rollout.sampling.{key}: truncated sampling draws from another distribution than the one trained; set "
            "algorithm.correction.kind to tis, or algorithm.old_policy to engine"
        )
    if algorithm.old_policy == "engine" and algorithm.correction.kind != "none":
        yield (
            "algorithm.correction.kind: with old_policy = engine the ratio already holds the difference between engine "
            "and trainer, so a correction would count it twice; set it to none, or old_policy to trainer"
        )
    if config.rollout.group_size < 2:
        yield ("rollout.group_size: grpo compares the responses of a group with each other and needs at least 2")
    if config.rollout.sampling.max_new_tokens >= config.rollout.engine.max_context:
        yield (
            f"rollout.sampling.max_new_tokens: {config.rollout.sampling.max_new_tokens} leaves no room for a prompt in "
            f"rollout.engine.max_context = {config.rollout.engine.max_context}"
        )

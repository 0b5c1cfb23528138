"""Rules of the algorithm: settings that make no sense together, each with the reason and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.models import RunConfig
    from penstock.config.sections.algorithm import AdvantageConfig

WHOLE_BATCH = ("batch_whitened", "reinforce_pp", "reinforce_pp_baseline")
"""Advantages that compare a sample with the whole step."""
_LEAST_GROUP = {"grpo": 2, "rloo": 2, "leave_one_out": 3, "max_normalized": 2, "reinforce_pp_baseline": 2}
"""Samples a group needs for the estimators that compare them with each other."""
_SEVERAL_TURNS = ("calculator", "verifiers:")
_PER_TOKEN_CORRECTIONS = ("tis", "icepop", "decoupled")


def algorithm_rules(config: RunConfig) -> Iterator[str]:
    """Combinations of rewards, advantage, loss, correction and sampling that do not train what they say."""
    yield from _advantage_rules(config)
    yield from _reward_rules(config)
    yield from _loss_rules(config)
    yield from _correction_rules(config)
    yield from _dynamic_sampling_rules(config)


def needs_whole_batch(advantage: AdvantageConfig) -> bool:
    """Whether an estimator compares a sample with the whole step."""
    return advantage.kind in WHOLE_BATCH or (advantage.kind == "custom" and advantage.whole_batch)


def idle_algorithm_settings(config: RunConfig) -> dict[str, str]:
    """Settings that have no effect alongside the others, with the reason."""
    algorithm, idle = config.algorithm, {}
    if algorithm.kl.coefficient == 0:
        for name in ("estimator", "place"):
            idle[f"algorithm.kl.{name}"] = "has no effect with coefficient = 0, which means no penalty; remove it"
    if algorithm.reward.overlong != "soft":
        for name in ("overlong_limit", "overlong_buffer", "overlong_penalty"):
            idle[f"algorithm.reward.{name}"] = f"has no effect with overlong = {algorithm.reward.overlong}; remove it"
    if algorithm.loss.kind != "gspo" and algorithm.loss.aggregation != "token_sum_norm":
        idle["algorithm.loss.constant_length"] = (
            f"has no effect with aggregation = {algorithm.loss.aggregation}; remove it, or set aggregation to "
            "token_sum_norm"
        )
    if algorithm.advantage.kind == "grpo" and not algorithm.advantage.normalize_std:
        idle["algorithm.advantage.epsilon"] = "has no effect with normalize_std = false, which divides by nothing"
    if not algorithm.dynamic_sampling.enabled:
        for name in ("max_filtered_per_step", "on_limit"):
            idle[f"algorithm.dynamic_sampling.{name}"] = "has no effect with enabled = false; remove it"
    return idle


def _advantage_rules(config: RunConfig) -> Iterator[str]:
    kind = config.algorithm.advantage.kind
    n, chunk = config.training.prompt_groups_per_step, config.training.min_groups_per_chunk
    parts = config.training.minibatches_per_step
    if parts > n:
        yield (
            f"training.minibatches_per_step: {parts} minibatches cannot share training.prompt_groups_per_step = {n} "
            f"groups; use at most {n}"
        )
    if parts > 1 and chunk < n:
        yield (
            "training.minibatches_per_step: more than one update per step needs the old policy's log-probs of the "
            f"whole step first, so the step cannot be trained group by group; set training.min_groups_per_chunk to {n}"
        )
    if needs_whole_batch(config.algorithm.advantage) and chunk < n:
        yield (
            f"algorithm.advantage.kind: {kind} compares each sample with the whole step, so the step cannot be trained "
            f"group by group; set training.min_groups_per_chunk to {n}, or use grpo or rloo, which stream"
        )
    least = _LEAST_GROUP.get(kind, 1)
    if config.rollout.group_size < least:
        yield (
            f"rollout.group_size: {kind} compares the responses of a group with each other and needs at least {least}"
        )


def _reward_rules(config: RunConfig) -> Iterator[str]:
    reward = config.algorithm.reward
    longest = reward.overlong_limit or config.rollout.sampling.max_new_tokens
    kind = config.rollout.environment.kind
    if reward.overlong == "soft" and reward.overlong_limit is None and kind.startswith(_SEVERAL_TURNS):
        yield (
            f"algorithm.reward.overlong_limit: is needed with {kind}, whose responses have several turns: "
            "rollout.sampling.max_new_tokens is the limit of one turn only"
        )
    if reward.clip_low is not None and reward.clip_high is not None and reward.clip_low >= reward.clip_high:
        yield (
            f"algorithm.reward.clip_low: {reward.clip_low} is not below clip_high = {reward.clip_high}, so all rewards "
            "would be the same"
        )
    if reward.overlong == "soft" and reward.overlong_buffer is None:
        yield (
            "algorithm.reward.overlong_buffer: is needed with overlong = soft, to know where the penalty starts; a "
            f"fifth of the maximum response length is usual, here {max(1, longest // 5)}"
        )
    if reward.overlong == "soft" and (reward.overlong_buffer or 0) > longest:
        yield (
            f"algorithm.reward.overlong_buffer: {reward.overlong_buffer} is more than the limit of {longest} tokens "
            "(overlong_limit, else rollout.sampling.max_new_tokens)"
        )


def _loss_rules(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    loss, kl = algorithm.loss, algorithm.kl
    if loss.kind != "gspo" and loss.aggregation == "token_sum_norm" and loss.constant_length is None:
        yield (
            "algorithm.loss.constant_length: is needed with aggregation = token_sum_norm; the longest response is "
            f"usual, here {config.rollout.sampling.max_new_tokens}"
        )
    if kl.coefficient > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield (
            "algorithm.kl.estimator: k1 as a term of the loss has a gradient that is zero on average, so it would not "
            "constrain the policy; use k3 or k2, or set place to reward"
        )
    if kl.coefficient > 0 and kl.place == "reward" and kl.estimator != "k1":
        yield (
            f"algorithm.kl.estimator: {kl.estimator} taken from the reward gives a gradient that is not that of the "
            "KL divergence; use k1, or set place to loss"
        )
    if kl.coefficient > 0 and kl.place == "reward" and algorithm.advantage.kind == "reinforce_pp_baseline":
        yield (
            "algorithm.kl.place: reinforce_pp_baseline takes its penalty in the loss; set place to loss, or use "
            "reinforce_pp"
        )
    if kl.coefficient > 0 and kl.place == "reward" and loss.kind == "gspo":
        yield (
            "algorithm.kl.place: reward gives every token an advantage of its own, and gspo has one ratio and one "
            "advantage for a whole response; set place to loss"
        )
    if loss.kind == "reinforce" and config.training.minibatches_per_step > 1:
        yield (
            "training.minibatches_per_step: reinforce has no ratio, so nothing would correct for how far the policy "
            "moves between the updates of a step; use ppo_clip or cispo, or one update"
        )
    if loss.kind == "reinforce" and algorithm.old_policy == "engine":
        yield (
            "algorithm.old_policy: reinforce has no ratio, and so no old policy; remove it, and set "
            "algorithm.correction.kind to tis if engine and trainer differ"
        )


def _correction_rules(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    kind = algorithm.correction.kind
    if algorithm.old_policy == "engine" and kind != "none":
        yield (
            "algorithm.correction.kind: with old_policy = engine the ratio already includes the difference between "
            "engine and trainer, so a correction would count it twice; set it to none, or old_policy to trainer"
        )
    if algorithm.loss.kind == "gspo" and kind in _PER_TOKEN_CORRECTIONS:
        yield (
            f"algorithm.correction.kind: {kind} weights each token by itself, and gspo has one ratio for a whole "
            "response; use sequence_masked, or none with old_policy = engine"
        )


def _dynamic_sampling_rules(config: RunConfig) -> Iterator[str]:
    kl = config.algorithm.kl
    if config.algorithm.dynamic_sampling.enabled and kl.coefficient > 0 and kl.place == "reward":
        yield (
            "algorithm.dynamic_sampling.enabled: with the KL penalty in the reward a group whose samples have the same "
            "reward still gives a gradient, so filtering it would bias the step; set algorithm.kl.place to loss, or "
            "switch it off"
        )
    kind = config.algorithm.advantage.kind
    whole_batch = needs_whole_batch(config.algorithm.advantage)
    if config.algorithm.dynamic_sampling.enabled and (whole_batch or kind == "reward"):
        yield (
            f"algorithm.dynamic_sampling.enabled: with {kind} a group whose samples have the same reward still "
            "gives a gradient, so filtering it would bias the step; use grpo or rloo, or turn it off"
        )

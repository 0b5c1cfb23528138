"""What the sampled groups say about engine, environment and data."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.algorithms.rewards import has_spread
from penstock.data_plane import fields
from penstock.run.verify.findings import Check, Finding, Status
from penstock.run.verify.subject import Subject

MOSTLY = 0.5
"""Share of truncated responses above which a person should look."""

ROLLOUTS = Check(
    "rollouts",
    "rollouts",
    ("groups", "wanted", "failed", "late", "samples", "tokens"),
    "Without rollouts a run has nothing to train on: check rollout.environment, data and "
    "rollout.engine.max_model_len (failed prompts), or allow more time with --seconds (late ones).",
)
REWARDS = Check(
    "rewards",
    "rewards",
    ("mean", "min", "max", "finite", "failed", "all_alike"),
    "A prompt that fails is tried rollout.failure.data_attempts times and then dropped; the run stops if more than "
    "rollout.failure.max_dropped_prompts prompts are dropped.",
)
TRUNCATION = Check(
    "truncation",
    "truncated responses",
    ("rate", "truncated", "samples"),
    "Most responses end at rollout.sampling.max_new_tokens (or at rollout.engine.max_model_len) without a stop; "
    "raise the limit, or choose algorithm.reward.overlong on purpose.",
)
SPREAD = Check(
    "reward_spread",
    "reward spread",
    ("groups_with_spread", "groups"),
    "Groups whose responses all have the same reward give no learning signal: the task is too hard or too easy for "
    "this model, or the reward function misses what it should see. Try other prompts or a larger rollout.group_size, "
    "and read some samples.",
)


async def check_rollouts(subject: Subject) -> Finding:
    """At least one group was generated and scored."""
    sampled = subject.sampled
    wanted = len(sampled.metas) + len(sampled.failures) + sampled.late
    tokens = sum(tags["response_length"] for meta in sampled.metas for tags in meta.tags)
    figures = {
        "groups": len(sampled.metas),
        "wanted": wanted,
        "failed": len(sampled.failures),
        "late": sampled.late,
        "samples": sum(len(meta) for meta in sampled.metas),
        "tokens": tokens,
    }
    shown = f"{len(sampled.metas)} of {wanted} groups, {figures['samples']} responses, {tokens:,} tokens"
    problem = f"First failure: {sampled.failures[0]}." if sampled.failures else ""
    status = Status.PASS if sampled.metas and not sampled.late else Status.WARN if sampled.metas else Status.FAIL
    return Finding(status, shown, figures, problem=problem if status is Status.FAIL else "")


async def check_rewards(subject: Subject) -> Finding:
    """Rewards are finite, and none of the prompts failed."""
    rewards_S, failures = _small(subject, fields.REWARD), subject.sampled.failures
    low, high, mean = float(rewards_S.min()), float(rewards_S.max()), float(rewards_S.mean())
    finite = bool(rewards_S.isfinite().all())
    alike = len(rewards_S) > 1 and low == high
    figures = {"mean": mean, "min": low, "max": high, "finite": finite, "failed": len(failures), "all_alike": alike}
    problem = "" if finite else "A reward is not finite."
    if alike:
        problem = (
            f"All {len(rewards_S)} responses have the reward {low:.3g}: a reward that never changes teaches nothing. "
            "Look at what the reward function is given, and at samples."
        )
    if failures:
        problem += f" {len(failures)} of the prompts could not be scored; first: {failures[0]}."
    shown = f"mean {mean:.3g}, from {low:.3g} to {high:.3g}" + (f"; {len(failures)} failed" if failures else "")
    budget = subject.config.rollout.failure.max_dropped_prompts
    status = Status.FAIL if len(failures) > budget else Status.WARN if problem else Status.PASS
    bar = f"finite, at most {budget} failed"
    return Finding(status, shown, figures, {"failed": budget}, bar, problem.strip())


async def check_truncation(subject: Subject) -> Finding:
    """Most responses are not truncated."""
    truncated_S = _small(subject, fields.TRUNCATED)
    rate = float(truncated_S.double().mean())
    figures = {"rate": rate, "truncated": int(truncated_S.sum()), "samples": len(truncated_S)}
    bars = {"rate": MOSTLY}
    status = Status.PASS if rate <= MOSTLY else Status.WARN
    return Finding(status, f"{rate:.0%} of {len(truncated_S)}", figures, bars, f"at most {MOSTLY:.0%}")


async def check_spread(subject: Subject) -> Finding:
    """At least one group tells better responses from worse ones."""
    metas, rewards_S = subject.sampled.metas, _small(subject, fields.REWARD)
    parts = torch.split(rewards_S, [len(meta) for meta in metas])
    spread = sum(bool(has_spread(rewards_G)) for rewards_G in parts)
    figures = {"groups_with_spread": spread, "groups": len(metas)}
    status = Status.PASS if spread else Status.WARN
    return Finding(status, f"{spread} of {len(metas)} groups", figures, bar="at least 1")


def _small(subject: Subject, name: str) -> Tensor:
    return subject.data_plane.get_samples(subject.sampled.meta, (name,)).tensor(name)

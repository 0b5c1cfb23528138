"""What an evaluation found: means over responses, and pass@k over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.algorithms.pass_at_k import pass_at_k
from penstock.config.models import EvalConfig
from penstock.rollout.environments.rewards.scores import Aggregation, combined_by_name


@dataclass(frozen=True)
class ScoredResponse:
    """One response that was scored."""

    reward: float
    length: int
    """Tokens that the model generated."""
    truncated: bool
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PassAtK:
    """pass@k over the prompts that have at least k scored responses."""

    k: int
    value: float | None
    """None if no prompt has that many."""
    left_out: int
    """Prompts with fewer."""


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found. Responses that failed are in none of its means, and never count as zero."""

    environment: str
    reward_mean: float
    prompts: int
    """Prompts with at least one scored response."""
    responses: int
    """Scored responses."""
    truncation_rate: float
    response_length_mean: float
    pass_at: tuple[PassAtK, ...] = ()
    failures: tuple[str, ...] = ()
    """Responses that could not be scored: which, and why."""
    failure_facts: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    """What the event of each says about its cause, if causes are counted."""
    overlong: int = 0
    """Prompts that left no room for a response and were left out (`data.overlong: drop`)."""
    overlong_cut: int = 0
    """Prompts that left no room for a response and of which only the last tokens were kept (`truncate_left`)."""
    version: int | None = None
    """The weight version that wrote every token; None if no response has a token."""
    seconds: float = field(default=0.0, compare=False)
    components: Mapping[str, float] = field(default_factory=dict)
    """Means of the reward components, by name."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured, by name: means, unless a column of its own says otherwise."""

    def metrics(self) -> dict[str, float]:
        """The flat figures, as in `metrics.jsonl`."""
        passes = {f"eval/pass@{found.k}": found.value for found in self.pass_at if found.value is not None}
        by_environment = {"eval/reward_mean": self.reward_mean} | passes
        return (
            by_environment
            | {f"{key}/{self.environment}": value for key, value in by_environment.items()}
            | {f"eval/pass@{found.k}_left_out": float(found.left_out) for found in self.pass_at}
            | {
                "eval/truncation_rate": self.truncation_rate,
                "eval/response_length_mean": self.response_length_mean,
                "eval/responses": float(self.responses),
                "eval/failures": float(len(self.failures)),
                "eval/overlong_dropped": float(self.overlong),
                "eval/overlong_truncated": float(self.overlong_cut),
                "timing/eval_s": self.seconds,
            }
            | {f"eval/reward/{name}": mean for name, mean in self.components.items()}
            | {f"eval/{self.environment}/{name}": mean for name, mean in self.measured.items()}
            | ({} if self.version is None else {"eval/version": float(self.version)})
        )

    def in_words(self) -> str:
        """`eval reward 0.412, pass@4 0.730 on 64 held-out prompts`, with what failed."""
        passes = "".join(f", pass@{found.k} {found.value:.3f}" for found in self.pass_at if found.value is not None)
        failed = f"; {len(self.failures)} responses failed and are not counted" if self.failures else ""
        long = f"; too long and not counted: {self.overlong} of the prompts" if self.overlong else ""
        long += f"; too long and cut on the left: {self.overlong_cut} of the prompts" if self.overlong_cut else ""
        return f"eval reward {self.reward_mean:.3f}{passes} on {self.prompts} held-out prompts{failed}{long}"


def make_report(
    scored: Mapping[str, Sequence[ScoredResponse]],
    config: EvalConfig,
    environment: str,
    failures: Sequence[str] = (),
    version: int | None = None,
    seconds: float = 0.0,
    failure_facts: Sequence[Mapping[str, Any]] = (),
    how: Mapping[str, Aggregation] | None = None,
) -> EvalReport:
    """The figures of responses by prompt id; at least one response must have been scored.

    `how` says how numbers that the environment measured become one, if that is not their mean.
    """
    responses = [response for found in scored.values() for response in found]
    count = len(responses)
    return EvalReport(
        environment=environment,
        reward_mean=sum(response.reward for response in responses) / count,
        prompts=sum(bool(found) for found in scored.values()),
        responses=count,
        truncation_rate=sum(response.truncated for response in responses) / count,
        response_length_mean=sum(response.length for response in responses) / count,
        pass_at=tuple(_pass_at(k, scored, config.pass_reward) for k in sorted(config.pass_at)),
        failures=tuple(failures),
        failure_facts=tuple(failure_facts),
        version=version,
        seconds=seconds,
        components=combined_by_name(response.components for response in responses),
        measured=combined_by_name((response.metrics for response in responses), how),
    )


def _pass_at(k: int, scored: Mapping[str, Sequence[ScoredResponse]], least: float) -> PassAtK:
    """The mean over prompts; one with fewer than k scored responses says nothing about k of them."""
    enough = [found for found in scored.values() if len(found) >= k]
    values = [pass_at_k(len(found), sum(response.reward >= least for response in found), k) for found in enough]
    return PassAtK(k, sum(values) / len(values) if values else None, len(scored) - len(enough))

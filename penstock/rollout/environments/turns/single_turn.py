"""Single-turn environments: one prompt, one response, one score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.environments.rewards.pool import FunctionName, RewardPool, described
from penstock.rollout.environments.rewards.scores import checked_numbers, checked_score, failures_about, failures_of
from penstock.rollout.prompts import Prompt


@dataclass(frozen=True)
class RewardCall:
    """A function and what it is given."""

    function: Callable[..., object] | FunctionName
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class SingleTurnEnvironment(ABC):
    """Subclasses give prompts and a `score`, which is called in the reward pool, in a thread of this process.

    If the reward is a function that can be imported by name, return it from `call`: it then runs in a process.
    """

    extra_columns: tuple[ExtraColumn, ...] = ()
    """Columns that `sample_columns` has values for."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    @property
    @abstractmethod
    def name(self) -> str:
        """For metrics and messages."""

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The dataset."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str) -> object:
        """The reward of a response: a finite number, or a mapping with `reward` and named components."""

    def call(self, prompt: Prompt, response: str) -> RewardCall:
        """What is called in the pool for the reward."""
        return RewardCall(self.score, (prompt, response))

    def sample_metrics(self, prompt: Prompt, response: str) -> Mapping[str, float]:
        """What else to measure about a response: `rollout/<environment>/<name>` in the metrics."""
        return {}

    def sample_columns(self, prompt: Prompt, response: str, segments: Sequence[Segment]) -> Mapping[str, Any]:
        """A response's values of `extra_columns`, by name.

        `segments` are the tokens of its row, prompt and response: a per-token column has a value for each, in order.
        """
        return {}

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Generate once, score once."""
        prompt_ids = handle.encode_prompt(prompt.content)
        generation = await handle.generate(prompt_ids)
        response = handle.decode(generation.token_ids)
        segments = (Segment(prompt_ids), Segment(generation.token_ids, generation))
        call = self.call(prompt, response)
        function = call.function.path if isinstance(call.function, FunctionName) else described(call.function)
        with failures_about(response), failures_of(function):
            score = checked_score(await self._pool.score(call.function, *call.args, **call.kwargs), prompt)
            metrics = checked_numbers(self.sample_metrics(prompt, response), prompt, "metric")
            columns = self.sample_columns(prompt, response, segments)
        return Trajectory(
            segments, score.reward, response, components=score.components, metrics=metrics, columns=columns
        )

    async def close(self) -> None:
        """End the reward pool."""
        await self._pool.close()

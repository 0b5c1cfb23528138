"""The environment protocol: single-turn, multi-turn and tool use are all `run(prompt, handle) -> Trajectory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.errors import EnvironmentFailure
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.prompts import Prompt


class Split(Enum):
    """Which prompts are meant."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one origin. Only tokens the model generated are trained; they are never re-tokenised."""

    token_ids: tuple[int, ...]
    generation: GenerationResult | None = None
    """How the model came to them; None for prompts, tool results and other text the model did not write."""


@dataclass(frozen=True)
class Trajectory:
    """One sample: its segments in order, and its reward."""

    segments: tuple[Segment, ...]
    reward: float
    response_text: str

    @property
    def length(self) -> int:
        """Tokens that the model generated."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.generation is not None)

    @property
    def truncated(self) -> bool:
        """The last thing the model wrote hit the token limit."""
        generations = [s.generation for s in self.segments if s.generation is not None]
        return bool(generations) and generations[-1].finish_reason is FinishReason.LENGTH


class GenerationHandle(Protocol):
    """How an environment talks to the model, for one sample."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """The prompt as token ids, in the chat template where the run uses one."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, without special tokens."""

    async def generate(self, context_ids: Sequence[int]) -> GenerationResult:
        """Let the model go on from these tokens."""


class Environment(Protocol):
    """Prompts, and the way from a prompt to a scored trajectory."""

    @property
    def name(self) -> str:
        """For metrics and messages."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The dataset."""

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Play one sample to its end. What goes wrong is an `EnvironmentFailure`, never a zero reward."""

    async def close(self) -> None:
        """End threads and processes; a second call is a no-op."""


def checked_reward(value: object, prompt: Prompt) -> float:
    """A reward that is a finite number; everything else is the environment's failure."""
    try:
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise EnvironmentFailure(f"the reward of prompt {prompt.prompt_id} is {value!r}, not a number") from error
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"the reward of prompt {prompt.prompt_id} is {reward}")
    return reward

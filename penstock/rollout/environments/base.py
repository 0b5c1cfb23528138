"""The environment protocol: single-turn, multi-turn and tool use are all `run(prompt, handle) -> Trajectory`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from penstock.errors import WrongReward
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.prompts import Message, Prompt
from penstock.runtime.wire.crossing import crosses
from penstock.text import safe

_LARGEST_REWARD = (2 - 2**-23) * 2.0**127
"""The largest float32: rows hold rewards in that dtype."""


@crosses
class Split(Enum):
    """Which prompts are meant."""

    TRAIN = "train"
    EVAL = "eval"


@crosses
@dataclass(frozen=True)
class Segment:
    """A run of tokens of one origin. Only tokens the model generated are trained; they are never re-tokenised."""

    token_ids: tuple[int, ...]
    generation: GenerationResult | None = None
    """How the model came to them; None for prompts, tool results and other text the model did not write."""


@crosses
@dataclass(frozen=True)
class Trajectory:
    """One sample: its segments in order, and its reward."""

    segments: tuple[Segment, ...]
    reward: float
    response_text: str
    out_of_room: bool = False
    """It ended because the engine's context had no room for a further turn."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name: `reward/<name>` in the metrics."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the environment measured: `rollout/<environment>/<name>` in the metrics."""
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The sample's values of the environment's `extra_columns`, by name."""

    def __post_init__(self) -> None:
        if isinstance(self.response_text, str):
            object.__setattr__(self, "response_text", safe(self.response_text))

    @property
    def row_length(self) -> int:
        """Tokens of its row: the prompt, what the model generated, and what the environment said in between."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def length(self) -> int:
        """Tokens that the model generated."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.generation is not None)

    @property
    def truncated(self) -> bool:
        """It ran out of tokens: in the last thing the model wrote, or before a further turn."""
        generations = [s.generation for s in self.segments if s.generation is not None]
        cut_off = bool(generations) and generations[-1].finish_reason is FinishReason.LENGTH
        return cut_off or self.out_of_room


class GenerationHandle(Protocol):
    """How an environment talks to the model, for one sample."""

    @property
    def uses_chat(self) -> bool:
        """Whether the run uses the tokenizer's chat template (`data.chat_template`)."""

    def encode_prompt(self, content: str | Sequence[Message]) -> tuple[int, ...]:
        """The prompt as token ids, in the chat template if the run uses one; `content` is `Prompt.content`."""

    def fit_prompt(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """A prompt encoded another way, cut if it is too long and `data.overlong` is `truncate_left`."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """What the model wrote, as text: without tokens that begin, pad or end a response, with all other special ones.

        Tags that are special tokens of the tokenizer (`</calc>`, `<tool_call>`) are words like others. The text of a
        response that a stop string ended ends with that string, even if its last token holds more.
        """

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """A chat as the text that the model continues; only if the run uses the chat template."""

    async def generate(
        self,
        context_ids: Sequence[int],
        *,
        stop_token_ids: AbstractSet[int] = frozenset(),
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> GenerationResult:
        """Let the model continue from these tokens.

        The response also ends at, and includes, one of `stop_token_ids`, or the token at which its text first contains
        one of `stop`, and has at most `max_new_tokens` tokens, where `rollout.sampling.max_new_tokens` is the default
        and the bound. Raises `PromptTooLong` if the context has no room for a single token.
        """


class Environment(Protocol):
    """Prompts, and the way from a prompt to a scored trajectory.

    One that adds columns of its own to its rows has `extra_columns`, a tuple of `ExtraColumn`, too; each of its
    trajectories then has a value for each of them in `columns`.
    """

    @property
    def name(self) -> str:
        """For metrics and messages."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The dataset."""

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Play one sample to the end. An error is an `EnvironmentFailure`, never a zero reward."""

    async def close(self) -> None:
        """End threads and processes; a second call is a no-op."""


@runtime_checkable
class GroupEnvironment(Protocol):
    """An environment that can only score all samples of a group together."""

    async def run_group(self, prompt: Prompt, handles: Sequence[GenerationHandle]) -> list[Trajectory]:
        """Play all samples of a group to the end, each with its own handle."""


def checked_reward(value: object, prompt: Prompt) -> float:
    """A reward that is a finite number, as rows hold it; everything else is the environment's failure."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        reward = float(value)  # type: ignore[arg-type]
    except OverflowError:
        reward = math.inf
    except (TypeError, ValueError) as error:
        problem = "returned None" if value is None else f"returned a value of type {type(value).__name__}"
        raise WrongReward(f"the reward of prompt {prompt.prompt_id} is {value!r}, not a number", problem) from error
    if math.isfinite(reward) and abs(reward) <= _LARGEST_REWARD:
        return reward
    problem = "is not a number" if math.isnan(reward) else "is larger than a 32-bit number can be"
    kind = "returned nan" if math.isnan(reward) else "returned a number that is too large"
    raise WrongReward(f"the reward of prompt {prompt.prompt_id} is {reward}, which {problem}", kind)

"""Multi-turn environments: the model and the environment take turns until there is a reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import ConfigError, PromptTooLong
from penstock.rollout.engines.base import FinishReason
from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.environments.rewards.scores import checked_numbers, checked_score
from penstock.rollout.environments.turns.conversation import Conversation
from penstock.rollout.prompts import Prompt

_TURNS = "turns"
"""The metric that every environment has; a column of an environment's own takes its place."""


@dataclass(frozen=True)
class Turn:
    """One turn of the model and, once it is given, the environment's reply."""

    response: str
    reply: str | None = None


@dataclass(frozen=True)
class Observation:
    """The environment's reply: text that the model sees and is never trained on."""

    text: str
    role: str = "user"
    """Who says it, if the run uses a chat template."""


@dataclass(frozen=True)
class Done:
    """The end of the trajectory."""

    reward: float | Mapping[str, float]
    """A number, or a mapping with `reward` and named components."""


class MultiTurnEnvironment(ABC):
    """Subclasses give prompts and a `step`; this class keeps the tokens.

    A turn of the model ends at the end-of-sequence token, at one of `turn_ends`, or after
    `rollout.sampling.max_new_tokens` tokens. After each, `step` sees all turns so far and either replies or ends the
    trajectory. It also ends, with the reward of `unfinished`, when the model has had `max_turns` turns, when a turn was
    cut off by a token limit, or when the engine's context has no room for a further one; the last two count as
    truncated.
    """

    max_turns: int = 8
    turn_ends: tuple[str, ...] = ()
    """Texts that end a turn, regardless of their tokenization; such a turn's text ends with the one found."""
    extra_columns: tuple[ExtraColumn, ...] = ()
    """Columns that `sample_columns` has values for."""

    @property
    def name(self) -> str:
        """For metrics and messages."""
        return type(self).__name__

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """The dataset."""

    @abstractmethod
    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        """What the environment does after the model's turn, which is the last of `turns`."""

    def unfinished(self, prompt: Prompt, turns: Sequence[Turn]) -> float | Mapping[str, float]:
        """The reward of a trajectory that ended before `step` ended it."""
        return 0.0

    def sample_metrics(self, prompt: Prompt, turns: Sequence[Turn]) -> Mapping[str, float]:
        """What to measure about a trajectory, however it ended: `rollout/<environment>/<name>` in the metrics.

        `turns`, how many turns the model had, is measured for every environment, unless a column of this name is
        its metric.
        """
        return {}

    def sample_columns(self, prompt: Prompt, turns: Sequence[Turn], segments: Sequence[Segment]) -> Mapping[str, Any]:
        """A trajectory's values of `extra_columns`, by name, however it ended.

        `segments` are the tokens of its row: a per-token column has a value for each, in order.
        """
        return {}

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Take turns with the model until the end."""
        stops = self._stop_token_ids(handle)
        talk = Conversation(handle)
        _open(talk, prompt, handle)
        turns: list[Turn] = []
        while True:
            try:
                generation = await handle.generate(talk.ids, stop_token_ids=stops, stop=self.turn_ends)
            except PromptTooLong:
                if not turns:
                    raise
                talk.drop_reply()
                return self._trajectory(talk, prompt, turns, None, out_of_room=True)
            talk.add(generation)
            turns.append(Turn(handle.decode(generation.token_ids)))
            outcome = await self.step(prompt, tuple(turns))
            if isinstance(outcome, Done):
                return self._trajectory(talk, prompt, turns, outcome.reward)
            if not isinstance(outcome, Observation):
                raise TypeError(f"step returned {type(outcome).__name__}, not an Observation or Done")
            if generation.finish_reason is FinishReason.LENGTH or len(turns) >= self.max_turns:
                return self._trajectory(talk, prompt, turns, None)
            _reply(talk, outcome, handle)
            turns[-1] = replace(turns[-1], reply=outcome.text)

    async def close(self) -> None:  # noqa: B027 - most environments have nothing to end
        """End threads and processes; a second call is a no-op."""

    def _trajectory(
        self,
        talk: Conversation,
        prompt: Prompt,
        turns: Sequence[Turn],
        reward: float | Mapping[str, float] | None,
        out_of_room: bool = False,
    ) -> Trajectory:
        value = self.unfinished(prompt, tuple(turns)) if reward is None else reward
        score = checked_score(value, prompt)
        text = "".join(turn.response + (turn.reply or "") for turn in turns)
        own = checked_numbers(self.sample_metrics(prompt, tuple(turns)), prompt, "metric")
        is_column = any(column.name == _TURNS and column.metric for column in self.extra_columns)
        metrics = own if is_column else {_TURNS: float(len(turns)), **own}
        segments = tuple(talk.segments)
        columns = self.sample_columns(prompt, tuple(turns), segments)
        return Trajectory(segments, score.reward, text, out_of_room, score.components, metrics, columns)

    def _stop_token_ids(self, handle: GenerationHandle) -> frozenset[int]:
        """Those of `turn_ends` that are single tokens, and so are known without reading the text."""
        check_turn_ends(self.turn_ends)
        encoded = {text: handle.encode(text) for text in self.turn_ends}
        single = {t: ids[0] for t, ids in encoded.items() if len(ids) == 1 and handle.decode_raw(ids) == t}
        unseen = [text for text, token in single.items() if handle.decode((token,)) != text]
        if unseen:
            raise ConfigError(
                [
                    f"rollout.sampling.stop_token_ids: {unseen[0]!r} ends every response of this run, so {self.name} "
                    "would not see it; its turn_ends has it already: remove it here, or there if it is the end of "
                    "sequence"
                ]
            )
        return frozenset(single.values())


def check_turn_ends(turn_ends: object) -> None:
    """Refuse one text when several are meant: each of its letters would end a turn."""
    if isinstance(turn_ends, str):
        raise TypeError(f'turn_ends is the text {turn_ends!r}, not a tuple of texts: write ("{turn_ends}",)')


def _open(talk: Conversation, prompt: Prompt, handle: GenerationHandle) -> None:
    if not handle.uses_chat:
        talk.open_ids(handle.encode_prompt(prompt.content))
    elif prompt.messages is None:
        talk.open([{"role": "user", "content": prompt.text}])
    else:
        talk.open(prompt.messages)


def _reply(talk: Conversation, outcome: Observation, handle: GenerationHandle) -> None:
    if handle.uses_chat:
        talk.reply([{"role": outcome.role, "content": outcome.text}])
    else:
        talk.reply_text(outcome.text)

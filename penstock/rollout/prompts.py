"""Prompts, and the order in which a run goes through them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from penstock.errors import SetupError
from penstock.runtime.wire.crossing import crosses
from penstock.text import is_safe, safe_value

_KNOWN_MODULES = ("datetime", "decimal", "fractions", "uuid")
"""Their values look the same in every process."""

Message = Mapping[str, Any]
"""One message of a chat: `role`, `content`, and what else a chat template knows."""


@crosses
@dataclass(frozen=True)
class Prompt:
    """One entry of the dataset. Its texts can always be written, no matter who made it: see `penstock.text`."""

    prompt_id: str
    """Unique in its dataset; with the epoch it is the key of the prompt's fate."""
    text: str
    """The prompt, or the contents of its messages, one per line."""
    answer: Any = None
    """The reference answer, in the form that the environment scores against."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Everything else the dataset says about it."""
    messages: tuple[Message, ...] | None = None
    """The prompt as a chat, if the dataset has chats."""
    columns: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)
    """The whole record that it was read from: every column by its own name. Empty if it was not read."""
    repaired: bool = field(default=False, init=False, compare=False, repr=False)
    """Whether a text of it had characters that cannot be written, which were replaced."""

    def __post_init__(self) -> None:
        for name in ("prompt_id", "text", "answer", "facts", "messages", "columns"):
            value = getattr(self, name)
            if not is_safe(value):
                object.__setattr__(self, name, safe_value(value))
                object.__setattr__(self, "repaired", True)

    @property
    def content(self) -> str | tuple[Message, ...]:
        """What the model is asked: the chat if there is one, else the text."""
        return self.text if self.messages is None else self.messages


@crosses
@dataclass(frozen=True)
class PromptVisit:
    """A prompt in one epoch: what the rollout pump dispatches, and what ends exactly once."""

    epoch: int
    prompt: Prompt
    redispatches: int = 0
    """How often its group was evicted or aborted so far."""
    position: int = 0
    """Place in the stream of all visits."""

    @property
    def key(self) -> str:
        """For logs: epoch and prompt id."""
        return f"{self.epoch}:{self.prompt.prompt_id}"


class PromptStream:
    """All visits of a run in order: every prompt once per epoch, reshuffled each epoch by the seed.

    A position names the same visit in every stream that has the same `digest`, regardless of its number of epochs.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, epochs: int, shuffle: bool, seed: int, generated: bool = False
    ) -> None:
        """`generated` prompts are made by code, not read: what is said of them may differ from process to process."""
        if not prompts:
            raise SetupError("the training dataset is empty: there is no prompt to train on")
        self._prompts = prompts
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed
        self._generated = generated
        self._order_of: tuple[int, list[int]] = (-1, [])
        """The epoch whose order is known, and the order."""

    def __len__(self) -> int:
        return len(self._prompts) * self._epochs

    def __iter__(self) -> Iterator[PromptVisit]:
        return self.from_position(0)

    def __getitem__(self, position: int) -> PromptVisit:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a stream of {len(self)} visits")
        epoch, place = divmod(position, len(self._prompts))
        return PromptVisit(epoch, self._prompts[self._order(epoch)[place]], position=position)

    def from_position(self, position: int) -> Iterator[PromptVisit]:
        """The visits from a position on."""
        return (self[each] for each in range(position, len(self)))

    @cached_property
    def digest(self) -> str:
        """Names the prompts and their order: ids, texts, the rest of each record in a data file, seed and shuffling.

        Solvers of generated tasks iterate over sets, so each process may pick another of several right answers: their
        answers are not part of the digest.
        """
        digest = hashlib.blake2b(f"{self._seed if self._shuffle else None}".encode(), digest_size=16)
        for prompt in self._prompts:
            digest.update(f"\x1e{prompt.prompt_id}\x1f{prompt.text}".encode())
            if not self._generated:
                digest.update(f"\x1f{_canonical(prompt)}".encode())
        return digest.hexdigest()

    def _order(self, epoch: int) -> list[int]:
        known, order = self._order_of
        if known != epoch:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(derive_seed(self._seed, "order", epoch)).shuffle(order)
            self._order_of = (epoch, order)
        return order


def _canonical(prompt: Prompt) -> str:
    """Answer, facts and messages, as the same text in every process."""
    content = [prompt.answer, _plain(prompt.facts), _plain(prompt.messages)]
    try:
        return json.dumps(content, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys of several kinds, or a value that holds itself
        return type(prompt.answer).__qualname__


def _plain(value: object) -> object:
    """A value in a form that JSON knows.

    Objects of other kinds count by the name of their class: their `repr` may have an address in it, or change from one
    process to the next in other ways, and then no resume would be accepted.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if value is None or isinstance(value, tuple):
        return value
    if callable(getattr(value, "tolist", None)):
        return value.tolist()  # type: ignore[attr-defined]
    kind = type(value)
    return repr(value) if kind.__module__ in _KNOWN_MODULES else kind.__qualname__


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any mix of numbers and names; the same everywhere and always."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

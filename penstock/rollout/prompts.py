"""Prompts, and the order in which a run goes through them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.errors import SetupError


@dataclass(frozen=True)
class Prompt:
    """One entry of the dataset."""

    prompt_id: str
    """Unique in its dataset; with the epoch it is the key of the prompt's fate."""
    text: str
    answer: Any = None
    """The reference answer, in whatever form the environment scores against."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Everything else the dataset says about it."""


@dataclass(frozen=True)
class PromptVisit:
    """A prompt in one epoch: what the rollout pump dispatches, and what ends exactly once."""

    epoch: int
    prompt: Prompt
    redispatches: int = 0
    """How often its group was evicted or aborted so far."""

    @property
    def key(self) -> str:
        """For logs: epoch and prompt id."""
        return f"{self.epoch}:{self.prompt.prompt_id}"


class PromptStream:
    """All visits of a run in order: every prompt once per epoch, shuffled anew at each epoch by the seed."""

    def __init__(self, prompts: Sequence[Prompt], *, epochs: int, shuffle: bool, seed: int) -> None:
        if not prompts:
            raise SetupError("the training dataset is empty: there is no prompt to train on")
        self._prompts = prompts
        self._epochs = epochs
        self._shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        return len(self._prompts) * self._epochs

    def __iter__(self) -> Iterator[PromptVisit]:
        for epoch in range(self._epochs):
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(derive_seed(self._seed, "order", epoch)).shuffle(order)
            for index in order:
                yield PromptVisit(epoch, self._prompts[index])


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any mix of numbers and names; the same everywhere and always."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_jsonl_prompts(path: str, *, prompt_key: str, answer_key: str, limit: int) -> list[Prompt]:
    """Prompts of a JSONL file, at most `limit`; their ids are line numbers or the record's own `id`."""
    file = Path(path)
    if not file.is_file():
        raise SetupError(f"{path!r} is a folder, not a file" if file.is_dir() else f"file {path!r} does not exist")
    prompts: list[Prompt] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(prompts) == limit:
                    break
                if line.strip():
                    prompts.append(_parse_record(line, f"{path}:{number}", number, prompt_key, answer_key))
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"dataset file {path!r} cannot be read as UTF-8 text: {error}") from error
    ids = [prompt.prompt_id for prompt in prompts]
    if len(set(ids)) != len(ids):
        raise SetupError(f"dataset file {path!r}: two records have the same id")
    return prompts


def _parse_record(line: str, where: str, number: int, prompt_key: str, answer_key: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SetupError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(prompt_key), str):
        raise SetupError(f"{where}: no text under {prompt_key!r}; set data.prompt_key to the key that holds the prompt")
    facts = {key: value for key, value in record.items() if key not in (prompt_key, answer_key, "id")}
    return Prompt(str(record.get("id", number)), record[prompt_key], record.get(answer_key), MappingProxyType(facts))

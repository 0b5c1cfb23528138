"""The few samples of a step that people read, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.sample_columns import prompt_ids
from penstock.runtime.wire.crossing import crosses
from penstock.runtime.workers.calls import LocalCalls, WorkerCalls
from penstock.text import safe

ReadTokens = Callable[[Sequence[int]], str]
"""Turns token ids into text, special tokens included."""


@dataclass(frozen=True)
class SampleText:
    """One sample, as text."""

    response: str
    rendered_prompt: str
    """What the model was asked first, special tokens included; empty if there is nothing to read tokens with."""


@crosses
@dataclass(frozen=True)
class ReadSample:
    """What is shown of a sample, as a worker finds it in its row."""

    response: str
    prompt_ids: tuple[int, ...]
    """What the model was asked first."""


class SampleReader:
    """Finds what is shown of samples in their rows; lives where rows may be read, and keeps nothing."""

    def __init__(self, data_plane: DataPlaneClient) -> None:
        self._data_plane = data_plane

    async def read_samples(self, meta: KVBatchMeta) -> tuple[ReadSample, ...]:
        """What is shown of these rows, in order."""
        names = (fields.RESPONSE_TEXT, fields.INPUT_IDS, fields.TOKEN_MASK)
        batch = await self._data_plane.get_samples_async(meta, names)
        ids, mask = batch.jagged(fields.INPUT_IDS), batch.jagged(fields.TOKEN_MASK)
        responses = batch.objects(fields.RESPONSE_TEXT).items
        return tuple(
            ReadSample(str(text), prompt_ids(ids.row(row), mask.row(row))) for row, text in enumerate(responses)
        )


class SampleTexts(Protocol):
    """Whoever gives texts of samples by their metadata."""

    async def read(self, meta: KVBatchMeta) -> list[SampleText]:
        """The texts of these rows, in order."""


class WorkerTexts:
    """Has a worker with the methods of `SampleReader` read the rows: only what is shown of them comes here.

    The worker needs no tokenizer, whose import would cost it more than everything else: prompts come as token ids.
    """

    def __init__(self, worker: WorkerCalls, read_tokens: ReadTokens | None = None) -> None:
        self._worker = worker
        self._read_tokens = read_tokens

    async def read(self, meta: KVBatchMeta) -> list[SampleText]:
        """The texts of these rows, in order."""
        found: tuple[ReadSample, ...] = await self._worker.call("read_samples", meta)
        return [SampleText(each.response, self._rendered(each.prompt_ids)) for each in found]

    def _rendered(self, prompt: Sequence[int]) -> str:
        return "" if self._read_tokens is None else safe(self._read_tokens(prompt))


def texts_of(data_plane: DataPlaneClient, read_tokens: ReadTokens | None = None) -> SampleTexts:
    """Texts that are read in this process."""
    return WorkerTexts(LocalCalls(SampleReader(data_plane)), read_tokens)

"""The few samples of a step that people read, as text; read where rollouts are made, which have the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.sample_columns import prompt_ids
from penstock.text import safe


@dataclass(frozen=True)
class SampleText:
    """One sample, as text."""

    response: str
    rendered_prompt: str
    """What the model was asked first, special tokens included; empty if there is nothing to read tokens with."""


class SampleTexts:
    """Fetches rows by metadata and returns their texts; the tokens stay here."""

    def __init__(self, data_plane: DataPlaneClient, read_tokens: Callable[[Sequence[int]], str] | None = None) -> None:
        """`read_tokens` turns token ids into text, special tokens included."""
        self._data_plane = data_plane
        self._read_tokens = read_tokens

    async def read(self, meta: KVBatchMeta) -> list[SampleText]:
        """The texts of these rows, in order."""
        tokens = (fields.INPUT_IDS, fields.TOKEN_MASK) if self._read_tokens is not None else ()
        batch = await self._data_plane.get_samples_async(meta, (fields.RESPONSE_TEXT, *tokens))
        responses = batch.objects(fields.RESPONSE_TEXT).items
        return [SampleText(str(text), self._rendered_prompt(batch, row)) for row, text in enumerate(responses)]

    def _rendered_prompt(self, batch: SampleBatch, row: int) -> str:
        if self._read_tokens is None:
            return ""
        ids_T, mask_T = (batch.jagged(name).row(row) for name in (fields.INPUT_IDS, fields.TOKEN_MASK))
        return safe(self._read_tokens(prompt_ids(ids_T, mask_T)))

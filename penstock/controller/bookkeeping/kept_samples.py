"""Keeps a few responses of a step for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.controller.failures.classify import describe
from penstock.controller.pumps.advantage import ScoredChunk
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.meta import KVBatchMeta
from penstock.observe.events import EventLog
from penstock.observe.samples import SampleLog, SampleRecord
from penstock.rollout.prompts import PromptVisit
from penstock.rollout.rows import prompt_ids
from penstock.text import safe

AboutGroup = Callable[[str], tuple[PromptVisit, int]]
"""The visit of a group, and the lag it was trained with."""


class SampleKeeper:
    """Fetches the text of chosen responses while their rows are still there, and writes them down.

    An error here is only an event: a run does not end because of samples it keeps for reading.
    """

    def __init__(
        self,
        log: SampleLog,
        data_plane: DataPlaneClient,
        events: EventLog,
        read_tokens: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._log = log
        self._data_plane = data_plane
        self._events = events
        self._read_tokens = read_tokens

    async def keep(self, step: int, chunks: Sequence[ScoredChunk], about: AboutGroup) -> None:
        """Write some responses of the chunks of a step."""
        places = [(chunk, row) for chunk in chunks for row in range(len(chunk.meta))]
        chosen = [places[place] for place in self._log.choose(step, len(places))]
        if not chosen:
            return
        meta = KVBatchMeta.concat([chunk.meta.subset([row]) for chunk, row in chosen])
        try:
            tokens = (fields.INPUT_IDS, fields.TOKEN_MASK) if self._read_tokens else ()
            batch = await self._data_plane.get_samples_async(meta, (fields.RESPONSE_TEXT, *tokens))
            for place, (chunk, row) in enumerate(chosen):
                response = str(batch.objects(fields.RESPONSE_TEXT).items[place])
                record = _record(step, chunk, row, response, about)
                self._log.write(replace(record, rendered_prompt=self._rendered_prompt(batch, place)))
        except Exception as error:  # noqa: BLE001 - any error costs only a page to read
            self._events.emit("samples_not_kept", step=step, cause=describe(error))

    def _rendered_prompt(self, batch: SampleBatch, place: int) -> str:
        if self._read_tokens is None:
            return ""
        ids_T, mask_T = (batch.jagged(name).row(place) for name in (fields.INPUT_IDS, fields.TOKEN_MASK))
        return safe(self._read_tokens(prompt_ids(ids_T, mask_T)))


def _record(step: int, chunk: ScoredChunk, row: int, response: str, about: AboutGroup) -> SampleRecord:
    group_id = fields.group_of(chunk.meta.sample_ids[row])
    visit, lag = about(group_id)
    tags = chunk.meta.tags[row]
    return SampleRecord(
        step=step,
        group_id=group_id,
        prompt_id=visit.prompt.prompt_id,
        environment=str(tags.get("environment", "")),
        prompt=visit.prompt.text,
        response=response,
        reward=float(chunk.rewards_S[row]),
        advantage=float(chunk.advantages_S[row]),
        lag=lag,
        length=int(chunk.lengths_S[row]),
        truncated=bool(chunk.truncated_S[row]),
        components=dict(tags.get("components", {})),
        metrics=dict(tags.get("metrics", {})),
    )

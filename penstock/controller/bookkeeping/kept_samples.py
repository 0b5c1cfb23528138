"""Keeps a few responses of a step for people to read; of the rows, only their texts come here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.controller.failures.classify import describe
from penstock.controller.pumps.advantage import ScoredChunk
from penstock.data_plane import fields
from penstock.data_plane.meta import KVBatchMeta
from penstock.observe.events import EventLog
from penstock.observe.samples import SampleLog, SampleRecord
from penstock.rollout.prompts import PromptVisit
from penstock.rollout.sample_texts import SampleText, SampleTexts

_READ_SECONDS = 30.0
"""Long enough for a worker that is just being started on a busy machine."""
_LEAST_SECONDS = 1.0

AboutGroup = Callable[[str], tuple[PromptVisit, int]]
"""The visit of a group, and the lag it was trained with."""


class SampleKeeper:
    """Asks for the texts of chosen responses while their rows are still there, and writes them down.

    An error here is only an event: a run does not end because of samples it keeps for reading. Neither does it wait for
    them: texts that do not come within half a minute are left out, and each further step waits half as long, down to a
    second, until texts come in time again.
    """

    def __init__(
        self,
        log: SampleLog,
        texts: SampleTexts,
        events: EventLog,
    ) -> None:
        self._log = log
        self._texts = texts
        self._events = events
        self._patience = _READ_SECONDS

    @property
    def wanted(self) -> bool:
        """Whether any are to be kept."""
        return self._log.wanted

    async def keep(self, step: int, chunks: Sequence[ScoredChunk], about: AboutGroup) -> None:
        """Write some responses of the chunks of a step."""
        places = [(chunk, row) for chunk in chunks for row in range(len(chunk.meta))]
        chosen = [places[place] for place in self._log.choose(step, len(places))]
        if not chosen:
            return
        meta = KVBatchMeta.concat([chunk.meta.subset([row]) for chunk, row in chosen])
        try:
            for (chunk, row), text in zip(chosen, await self._read(meta), strict=True):
                self._log.write(_record(step, chunk, row, text, about))
        except Exception as error:  # noqa: BLE001 - any error costs only a page to read
            self._events.emit("samples_not_kept", step=step, cause=describe(error))

    async def _read(self, meta: KVBatchMeta) -> list[SampleText]:
        limit = self._patience
        try:
            async with asyncio.timeout(limit) as patience:
                texts = await self._texts.read(meta)
        except TimeoutError as error:
            if not patience.expired():
                raise
            self._patience = min(limit, max(_LEAST_SECONDS, limit / 2))
            raise TimeoutError(f"their texts were not read within {limit:g} s") from error
        self._patience = _READ_SECONDS
        return texts


def _record(step: int, chunk: ScoredChunk, row: int, text: SampleText, about: AboutGroup) -> SampleRecord:
    group_id = fields.group_of(chunk.meta.sample_ids[row])
    visit, lag = about(group_id)
    tags = chunk.meta.tags[row]
    return SampleRecord(
        step=step,
        group_id=group_id,
        prompt_id=visit.prompt.prompt_id,
        environment=str(tags.get("environment", "")),
        prompt=visit.prompt.text,
        response=text.response,
        rendered_prompt=text.rendered_prompt,
        reward=float(chunk.rewards_S[row]),
        advantage=float(chunk.advantages_S[row]),
        lag=lag,
        length=int(chunk.lengths_S[row]),
        truncated=bool(chunk.truncated_S[row]),
        components=dict(tags.get("components", {})),
        metrics=dict(tags.get("metrics", {})),
    )

"""A trainer whose calls show on the timeline."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.data_plane.meta import KVBatchMeta
from penstock.observe.timeline import Timeline
from penstock.training.interface import ChunkResult, Prepared, StepResult, Trainer, TrainerSnapshot
from penstock.weights.publication import WeightPublication, WeightSite

R = TypeVar("R")


class TracedTrainer(Trainer):
    """Passes every call on, and records when the trainer worked on it.

    A trainer carries out calls one at a time, in order, so a call's work begins when it was made or when the previous
    one ended, whichever is later. If the trainer itself reports how long it took, that counts. A call that raises is
    recorded too, with the error's name. Steps are numbered from 1, as in `metrics.jsonl`.
    """

    def __init__(self, trainer: Trainer, timeline: Timeline) -> None:
        self._trainer = trainer
        self._timeline = timeline
        self._track = timeline.track("trainer", "trainer")

    async def begin_train_step(self, step_id: int) -> None:
        await self._trainer.begin_train_step(step_id)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        work = self._trainer.train_microbatch(step_id, meta)
        facts = {"step": step_id + 1, "groups": len(meta.group_ids), **_size(meta)}
        return await self._worked("train_microbatch", work, **facts)

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        work = self._trainer.finish_train_step(step_id, last=last)
        return await self._worked("finish_train_step", work, step=step_id + 1)

    async def abort_train_step(self, step_id: int) -> None:
        await self._worked("abort_train_step", self._trainer.abort_train_step(step_id), step=step_id + 1)

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        work = self._trainer.compute_logprobs(meta, field_name)
        await self._worked("compute_logprobs", work, field=field_name, **_size(meta))

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        return await self._worked("prepare", self._trainer.prepare(meta), **_size(meta))

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        return await self._worked("publish_weights", self._trainer.publish_weights(sites))

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        await self._trainer.release_weights(publication, still_read=still_read)

    async def snapshot(self) -> TrainerSnapshot:
        return await self._worked("snapshot", self._trainer.snapshot())

    async def load_checkpoint(self, folder: Path) -> None:
        await self._worked("load_checkpoint", self._trainer.load_checkpoint(folder))

    async def close(self) -> None:
        await self._trainer.close()

    async def _worked(self, name: str, work: Awaitable[R], **args: Any) -> R:
        made = self._timeline.now()
        try:
            result = await work
        except BaseException as error:
            self._track.add(name, made, self._timeline.now(), **args, error=type(error).__name__)
            raise
        now = self._timeline.now()
        if isinstance(result, ChunkResult):
            args["microbatches"] = result.microbatches
        if isinstance(result, ChunkResult | Prepared):
            made = max(made, now - result.seconds)
        self._track.add(name, made, now, **args)
        return result


def _size(meta: KVBatchMeta) -> dict[str, int]:
    return {"samples": len(meta), "tokens": meta.total_tokens}

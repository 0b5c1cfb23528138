"""The step the train pump has open: its chunks, the calls queued for it, and its replay after an error."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from penstock.algorithms.custom import CustomCodeError
from penstock.algorithms.reduction import Normaliser, StepMetric
from penstock.buffer.slots import Slot
from penstock.controller.bookkeeping.step_stats import StepStats
from penstock.controller.failures.classify import causes, classify, describe
from penstock.controller.failures.losses import loss_in
from penstock.controller.pumps.advantage import ScoredChunk
from penstock.controller.pumps.minibatches import merge_results, split_groups
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import FailureKind, NonFiniteError, StepStateError, TrainerStuck
from penstock.observe.events import EventLog
from penstock.training.interface import ChunkResult, StepResult, Trainer
from penstock.training.step import OptimizerStepError

R = TypeVar("R")

_QUEUED_AHEAD = 1
"""Chunks queued behind the one that trains: enough that the trainer never waits for the pump, few enough that groups
which become ready meanwhile still join a larger chunk."""


class OpenStep:
    """Feeds one step to the trainer.

    Invariant: `slots` holds every group taken for the step so far; their rows stay in the data plane until the step has
    ended, so that a pass that failed before the optimizer ran can be repeated from them.
    """

    def __init__(self, step_id: int, trainer: Trainer, events: EventLog, attempts: int, minibatches: int) -> None:
        self.step_id = step_id
        self.slots: list[Slot] = []
        self.stats = StepStats()
        self.filtered = 0
        """Groups that were replaced because they teach nothing."""
        self.chunks_trained = 0
        self._minibatches = minibatches
        self._trainer = trainer
        self._events = events
        self._attempts_left = attempts - 1
        self._trainable: list[KVBatchMeta] = []
        """What the trainer has been given, and is given again after an error."""
        self._held_back: list[KVBatchMeta] = []
        """With several updates a step: all chunks so far, as all must be there before the first update."""
        self._queued: deque[asyncio.Task[ChunkResult]] = deque()
        self._begun = False
        self._writing: asyncio.Future[Any] | None = None
        """The last work that writes to rows; if the step was abandoned, it may still go on."""

    @property
    def number(self) -> int:
        """The step as people count it, from 1: as in `metrics.jsonl`."""
        return self.step_id + 1

    @property
    def groups(self) -> int:
        """Groups taken so far."""
        return len(self.slots)

    def take(self, slots: Sequence[Slot]) -> None:
        """These groups belong to the step from now on, no matter what becomes of it."""
        self.slots += slots

    def leave_out(self, slots: Sequence[Slot]) -> None:
        """These groups are not trained after all; their rows are cleared already."""
        gone = {slot.group_id for slot in slots}
        self.slots = [slot for slot in self.slots if slot.group_id not in gone]
        self.filtered += len(slots)

    async def prepare(self, meta: KVBatchMeta) -> KVBatchMeta:
        """Have the trainer add the columns that advantages and loss need; after an error the step is replayed."""
        prepared = await self._written(lambda: asyncio.ensure_future(self._trainer.prepare(meta)))
        self.stats.times.logprobs += prepared.seconds
        return prepared.meta

    async def score(self, submit: Callable[[], asyncio.Future[ScoredChunk]]) -> ScoredChunk:
        """Have a chunk's advantages computed; after an error the step is replayed."""
        return await self._written(submit)

    async def _written(self, begin: Callable[[], asyncio.Future[R]]) -> R:
        """Wait for work that writes to the step's rows. If cancelled, the work continues, and `abandon` waits for it.

        Otherwise it could rewrite rows that were cleared in the meantime.
        """
        while True:
            self._writing = begin()
            try:
                return await asyncio.shield(self._writing)
            except Exception as error:  # noqa: BLE001 - raised when attempts are spent
                await self._replay(error)

    async def feed(self, slots: Sequence[Slot], chunk: ScoredChunk, trainer_version: int) -> None:
        """Queue a chunk of taken groups; returns while it trains. One without valid tokens is only counted."""
        self.stats.add_chunk(chunk, slots, trainer_version)
        if chunk.valid_tokens == 0:
            return
        if self._minibatches > 1:
            self._held_back.append(chunk.without(chunk.untrained_groups()).meta)
            return
        self._trainable.append(chunk.meta)
        await self._start(chunk.meta)
        await self._reap(_QUEUED_AHEAD)

    async def finish(self, version: int) -> StepResult:
        """Wait for the queued chunks and close the step; one that never had valid tokens changes nothing."""
        if self._held_back:
            return await self._train_minibatches()
        await self._reap(0)
        if not self._begun:
            return StepResult(
                self.step_id, updated=False, version=version, measured={"empty_steps": StepMetric(1.0, Normaliser.MIN)}
            )
        return await self._finish_one(last=True)

    async def _finish_one(self, *, last: bool) -> StepResult:
        while True:
            await self._reap(0)
            before = time.monotonic()
            try:
                result = await self._trainer.finish_train_step(self.step_id, last=last)
            except (NonFiniteError, OptimizerStepError):
                raise
            except Exception as error:  # noqa: BLE001 - the optimizer has not run: replayed like a failed pass
                await self._replay(error)
                continue
            self.stats.times.finish += time.monotonic() - before
            self._begun = False
            return result

    async def _train_minibatches(self) -> StepResult:
        """One update after the other; one that fails before its optimizer ran is replayed by itself."""
        results: list[StepResult] = []
        parts = split_groups(self._held_back, self._minibatches)
        for place, part in enumerate(parts):
            self._trainable = [part]
            try:
                await self._start(part)
                results.append(await self._finish_one(last=place == len(parts) - 1))
            except Exception as error:
                if not results or isinstance(error, NonFiniteError | OptimizerStepError) or _is_final(error):
                    raise
                raise OptimizerStepError(
                    f"update {place + 1} of the {len(parts)} of a step failed ({describe(error)}) after earlier "
                    "updates had changed the weights, which are now between two versions: resume from the last "
                    "checkpoint"
                ) from error
        return merge_results(results)

    async def abandon(self) -> None:
        """Drop everything the trainer accumulated."""
        await self._settle()
        if self._begun:
            self._begun = False
            await self._trainer.abort_train_step(self.step_id)

    async def _start(self, meta: KVBatchMeta) -> None:
        """Queue a chunk; if the trainer cannot begin, the step is replayed, including the chunk."""
        try:
            await self._queue(meta)
        except Exception as error:  # noqa: BLE001 - raised when attempts are spent
            await self._replay(error)

    async def _queue(self, meta: KVBatchMeta) -> None:
        if not self._begun:
            self._begun = True  # from the call on: cancelled while it waits, the trainer may still open the step
            await self._trainer.begin_train_step(self.step_id)
        self._queued.append(asyncio.create_task(self._trainer.train_microbatch(self.step_id, meta)))

    async def _reap(self, leave: int) -> None:
        """Take in results until at most `leave` calls are outstanding; an error replays the step."""
        while self._queued and (len(self._queued) > leave or self._queued[0].done()):
            try:
                result = await self._queued[0]
            except Exception as error:  # noqa: BLE001 - replayed, or raised when attempts are spent
                await self._replay(error)
                continue
            self._queued.popleft()
            self.chunks_trained += 1
            self.stats.times.train_busy += result.seconds

    async def _replay(self, error: Exception) -> None:
        """Begin the step again with everything it has been given; raises the error when attempts are spent.

        There is no replay if the trainer is stuck in a call, or if it or the data plane is gone, since no attempt can
        succeed then; or if the user's own loss failed, since it would fail again.
        """
        while True:
            if _is_final(error):
                raise error
            await self._settle()
            try:
                await self._trainer.abort_train_step(self.step_id)
            except Exception as gone:
                raise error from gone  # the first cause says more
            self._begun = False
            if self._attempts_left == 0 or _is_the_users(error):
                raise error
            self._attempts_left -= 1
            self._note_replay(error)
            try:
                for meta in self._trainable:
                    await self._queue(meta)
            except Exception as again:  # noqa: BLE001 - the next attempt, if there is one
                error = again
            else:
                return

    def _note_replay(self, error: Exception) -> None:
        self._events.emit("step_replayed", step=self.number, cause=describe(error), chunks=len(self._trainable))

    async def _settle(self) -> None:
        """Let every queued call end, regardless of its outcome; those behind a failed one fail on the step's state."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        queued, self._queued = list(self._queued), deque()
        for outcome in await asyncio.gather(*queued, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, StepStateError):
                self._events.emit("train_microbatch_failed", step=self.number, cause=describe(outcome))


def _is_final(error: Exception) -> bool:
    """Whether the parts of the run can take no more work."""
    return isinstance(error, TrainerStuck) or loss_in(error) is not None


def _is_the_users(error: Exception) -> bool:
    """Whether the user's code failed on its data: a repeat would fail the same way."""
    return classify(error) is not FailureKind.INFRA and any(isinstance(link, CustomCodeError) for link in causes(error))

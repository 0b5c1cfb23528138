"""A trainer whose calls have a time limit and which can report what it is doing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import TrainerStuck
from penstock.runtime.awake import wait_awake
from penstock.runtime.cancellation import ended_within, leave_behind
from penstock.training.interface import ChunkResult, Prepared, StepResult, Trainer, TrainerSnapshot
from penstock.weights.publication import WeightPublication, WeightSite

R = TypeVar("R")

_CLOSE_SECONDS = 2.0
"""How long a trainer that has answered so far may take to end its threads; no call is awaited then."""


@dataclass(eq=False)
class _Call:
    """A call that has not returned."""

    name: str
    made: float


class GuardedTrainer(Trainer):
    """Forwards every call; one that does not return in time raises `TrainerStuck`, and so do all later ones.

    A trainer carries out calls one at a time, in order, so the clock of a call starts when it was made or when the
    previous one ended, whichever is later; it stops while the whole process is stopped. If a caller is cancelled, its
    call stays under way until the trainer returns from it; a call still waiting for its turn is withdrawn. A stuck
    trainer is unusable: its thread cannot be ended, and nothing waits for it again, not even `close`.

    Worked example, 10 s: `train_microbatch` is called at 0 s and again at 1 s. The first returns at 8 s, so the second
    has until 18 s. It does not return: both its caller and any later caller of `abort_train_step` get `TrainerStuck`.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        call_seconds: float,
        snapshot_seconds: float,
        home: str = "thread",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._call_seconds = call_seconds
        self._snapshot_seconds = snapshot_seconds
        self._home = home
        """What it runs in, for messages."""
        self._clock = clock
        self._calls: list[_Call] = []
        """In the order they were made."""
        self._last_end = clock()
        self._stuck: TrainerStuck | None = None
        self._changed = asyncio.Event()
        """Set, and replaced, when a call has returned or the trainer counts as stuck: clocks restart."""

    def activity(self) -> str:
        """What it is doing, for a diagnosis."""
        if self._stuck is not None:
            return f"stuck: {self._stuck}"
        if not self._calls:
            return "idle"
        first, behind = self._calls[0], len(self._calls) - 1
        text = f"in {first.name} for {self._clock() - self._began(first):.1f} s"
        return f"{text}, {behind} more waiting" if behind else text

    async def begin_train_step(self, step_id: int) -> None:
        await self._limited("begin_train_step", lambda: self._trainer.begin_train_step(step_id))

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        return await self._limited("train_microbatch", lambda: self._trainer.train_microbatch(step_id, meta))

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        return await self._limited("finish_train_step", lambda: self._trainer.finish_train_step(step_id, last=last))

    async def abort_train_step(self, step_id: int) -> None:
        await self._limited("abort_train_step", lambda: self._trainer.abort_train_step(step_id))

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        await self._limited("compute_logprobs", lambda: self._trainer.compute_logprobs(meta, field_name))

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        return await self._limited("prepare", lambda: self._trainer.prepare(meta))

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        return await self._limited("publish_weights", lambda: self._trainer.publish_weights(sites))

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """Has no limit of its own: a trainer that is stuck is found by the next call that waits for it."""
        await self._trainer.release_weights(publication, still_read=still_read)

    async def snapshot(self) -> TrainerSnapshot:
        return await self._limited("snapshot", self._trainer.snapshot, checkpoint=True)

    async def load_checkpoint(self, folder: Path) -> None:
        await self._limited("load_checkpoint", lambda: self._trainer.load_checkpoint(folder), checkpoint=True)

    async def close(self) -> None:
        """End the trainer's threads; a stuck one is abandoned."""
        await ended_within(self._trainer.close(), 0.0 if self._stuck else _CLOSE_SECONDS)

    async def _limited(self, name: str, begin: Callable[[], Coroutine[Any, Any, R]], *, checkpoint: bool = False) -> R:
        if self._stuck is not None:
            raise TrainerStuck(str(self._stuck))
        limit = self._snapshot_seconds if checkpoint else self._call_seconds
        call = _Call(name, self._clock())
        self._calls.append(call)
        work = asyncio.ensure_future(begin())
        work.add_done_callback(lambda _: self._came_back(call))
        spent, began = 0.0, self._began(call)
        try:
            while not work.done():
                spent += await self._wait(work, limit - spent)
                if work.done():
                    break
                if self._began(call) > began:
                    spent, began = 0.0, self._began(call)
                if self._stuck is None and spent >= limit:
                    self._stuck = TrainerStuck(self._why(name, limit, checkpoint=checkpoint))
                    self._tell_change()
                if self._stuck is not None:
                    raise TrainerStuck(str(self._stuck))
            return work.result()
        finally:
            if not work.done():
                is_under_way = self._stuck is None and self._calls[0] is call
                leave_behind(work, cancel=not is_under_way)

    def _came_back(self, call: _Call) -> None:
        if self._calls[0] is call:
            self._last_end = self._clock()
        self._calls.remove(call)
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _began(self, call: _Call) -> float:
        return max(call.made, self._last_end)

    async def _wait(self, work: asyncio.Future[Any], seconds: float) -> float:
        """Wait until it has ended, something has changed, or `seconds` have passed; returns the time that passed."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            return await wait_awake({work, changed}, seconds)
        finally:
            changed.cancel()

    def _why(self, name: str, limit: float, *, checkpoint: bool) -> str:
        setting = "checkpoint_seconds" if checkpoint else "trainer_seconds"
        return (
            f"the trainer's call {name} did not return within {limit:g} s (runtime.timeouts.{setting}); its "
            f"{self._home} is still in it, so nothing can be retried. If calls can take this long, raise "
            f"runtime.timeouts.{setting}"
        )

"""The SingleController: starts the pumps, keeps the throughput accounts, and ends everything in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.config.models import RunConfig
from penstock.controller.bookkeeping.group_book import GroupBook
from penstock.controller.bookkeeping.ledger import Ledger
from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.controller.bookkeeping.run_totals import run_totals
from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, SavedController
from penstock.controller.bookkeeping.state_keeper import StateKeeper
from penstock.controller.bookkeeping.throughput import Throughput
from penstock.controller.bookkeeping.work_queue import WorkQueue
from penstock.controller.failures.cut_off import CutOffWatch
from penstock.controller.failures.drops import DropBook
from penstock.controller.failures.engine_condition import rank_condition
from penstock.controller.failures.watchdog import Watchdog
from penstock.controller.parts import Parts
from penstock.controller.pumps.advantage import AdvantagePump
from penstock.controller.pumps.engine_care import EngineCare
from penstock.controller.pumps.in_flight import InFlight
from penstock.controller.pumps.pump_group import PumpGroup
from penstock.controller.pumps.rollout import RolloutPump
from penstock.controller.pumps.room_watch import RoomWatch
from penstock.controller.pumps.train import TrainPump
from penstock.controller.pumps.train_settings import FinishedStep, TrainPumpSettings
from penstock.controller.pumps.weight_sync import WeightSync
from penstock.errors import PenstockError, RunStuck, TrainerLost
from penstock.runtime.cancellation import ended_within
from penstock.runtime.ending import Ending

AfterStep = Callable[[int, dict[str, float]], Awaitable[None]]
"""Called with the number of finished steps and the step's flat metrics, before the next step begins."""


_UNHURRIED = frozenset({"max_minutes", "early_stop"})
"""Reasons to end that nobody waits for."""
_LEAST_SECONDS = 5.0
"""A trainer gets at least this long to show that it answers."""


class SingleController:
    """One CPU-only asyncio object that runs the pumps over the shared buffer.

    The pumps live in one group: the first that raises ends the others, and `run` raises what it raised. The run ends
    when the data runs out, when `max_steps` is reached, or when `stop` is called. Ending takes at most
    `runtime.timeouts.stop_seconds`: anything that has not finished by then is left behind and named. If nobody is
    waiting for the end, as with `max_minutes`, the open step first gets `runtime.timeouts.trainer_seconds`.
    """

    def __init__(self, config: RunConfig, parts: Parts, after_step: AfterStep) -> None:
        self._parts = parts = parts.for_controller()
        self._after_step = after_step
        self._max_minutes = config.training.max_minutes
        self._weights_due = config.training.backend != "none"
        """Whether the engines lack the weights that the run begins with. Without a trainer they bring their own."""
        self._engines_ready = asyncio.Event()
        self._stop_reason: str | None = None
        self._stopping = asyncio.Event()
        timeouts = config.runtime.timeouts
        self._ending = Ending(timeouts.stop_seconds)
        self._step_seconds = timeouts.trainer_seconds
        self._hurried = asyncio.Event()
        """Set when somebody waits for the end."""
        self._throughput = Throughput(parts.engines)
        self._cut_off = CutOffWatch(parts.events)
        self.drops = DropBook(config.rollout.failure, config.training.prompt_groups_per_step)
        trace = PumpTrace(parts.timeline, parts.buffer, parts.engines)
        self.ledger = Ledger(parts.stream, parts.record_end)
        work = WorkQueue(self.ledger, parts.buffer)
        self.book = GroupBook(parts, self.ledger, work, self.drops, trace, config.rollout.failure.max_redispatches)
        self._state = StateKeeper(
            parts,
            self.ledger,
            self.book,
            self.drops,
            self._throughput,
            keeps_ready=not config.deterministic,
            truncates=config.rollout.sampling.is_truncated,
        )
        self._in_flight = InFlight(config.rollout.max_inflight_groups, parts.buffer)
        self.rollouts = RolloutPump(
            parts, self.book, work, self._in_flight, config.rollout, trace, config.data.overlong
        )
        self.advantages = AdvantagePump(
            parts.data_plane, config.algorithm, config.rollout.sampling.max_new_tokens, parts.timeline
        )
        self.sync = WeightSync(
            parts,
            self._in_flight,
            config.weight_sync.mode,
            trace,
            limit_seconds=timeouts.weights_seconds,
            ending=self._ending,
        )
        self.care = EngineCare(parts, self.sync, config.rollout.failure)
        self.training = TrainPump(
            parts,
            self.book,
            self.advantages,
            self.sync,
            self.drops,
            TrainPumpSettings.of(config),
            self._step_finished,
            trace,
        )
        self.room = RoomWatch(parts, self.training, self.sync, config.training.prompt_groups_per_step)
        self.hook_progress: Callable[[], int] = lambda: 0
        """Grows while `after_step` makes progress, in an evaluation or a checkpoint, so that it is no stall."""
        self.watchdog = Watchdog(
            self._progress,
            self.diagnosis,
            parts.events,
            stall_seconds=config.rollout.failure.stall_seconds,
            stop=config.rollout.failure.on_stall == "stop",
            grace_seconds=timeouts.stop_seconds,
            end_process=parts.end_process,
            waits_for_engines=lambda: parts.engines.waits_for_engines,
        )

    def diagnosis(self) -> dict[str, Any]:
        """What every part is waiting for, in readable form."""
        buffer = self._parts.buffer
        return {
            "rollout_pump": f"waiting for {self.rollouts.waiting_for}",
            "train_pump": f"waiting for {self.training.waiting_for}",
            "advantage_pump": f"waiting for {self.advantages.waiting_for}",
            "weight_sync": f"waiting for {self.sync.waiting_for}",
            "groups_in_flight": self._told(self._in_flight.ages()),
            "groups_between_attempts": self._told(self._in_flight.resting()),
            "gate": "open" if self._in_flight.gate_open else "closed",
            "buffer": f"{buffer.reserved} reserved, {buffer.ready} ready, {buffer.free_permits} permits free",
            "versions": f"trainer at {buffer.clock.trainer_version}, engines at {buffer.clock.served_version}",
            "engines": {rank.name: rank_condition(rank) for rank in self._parts.engines.ranks},
            **{name: tell() for name, tell in self._parts.activities.items()},
        }

    def _told(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Groups as people look for them, with their prompts."""
        return {
            f"{group} (prompt {self.book.visit(group).prompt.prompt_id})": round(value, 1)
            for group, value in seconds.items()
        }

    def _progress(self) -> tuple[int, ...]:
        buffer = self._parts.buffer
        counts = (buffer.clock.step, self.book.committed, self.training.chunks_trained, self.drops.dropped)
        return (*counts, self.hook_progress())

    @property
    def elapsed_seconds(self) -> float:
        """Since the run began, without the time between its processes."""
        return self._throughput.elapsed

    @property
    def tokens_generated(self) -> int:
        """Since the run began."""
        return self._throughput.tokens

    @property
    def ending(self) -> asyncio.Event:
        """Set when the run is ending while `after_step` is still at work: it should finish."""
        return self.sync.run_is_ending

    def stop(self, reason: str) -> None:
        """End the run now: the open step is aborted, or finished if its optimizer has begun."""
        if reason not in _UNHURRIED:
            self._hurried.set()
        if self._stop_reason is None:
            self._stop_reason = reason
            self._stopping.set()

    async def run(self) -> str:
        """Run to the end; says why it ended (`max_steps`, `data_exhausted`, or the reason given to `stop`)."""
        pumps = PumpGroup(self._ending)
        background = [
            pumps.start("rollout pump", self._dispatch()),
            pumps.start("advantage pump", self.advantages.run()),
            pumps.start("watchdog", self.watchdog.run()),
            pumps.start("engine care", self.care.run()),
            pumps.start("trainer watch", self._watch_trainer()),
            pumps.start("room watch", self.room.run()),
        ]
        training = pumps.start("train pump", self._train())
        stopping = pumps.start("limit on time", self._stopped())
        try:
            await pumps.until(training, stopping)
            reason = _result(training) or _result(stopping)
            await pumps.end(training, stopping, patience_seconds=self._step_seconds, impatient=self._hurried)
            await pumps.end(*background)
        except asyncio.CancelledError:
            if self._ending.begun.is_set():  # it was told to end before, and now must do so at once
                self._ending.hurry()
            await pumps.end_all()
            raise
        self._tell_left_behind(pumps, reason)
        if pumps.first_error is not None:
            raise pumps.first_error from pumps.first_error.__cause__
        assert reason is not None
        await ended_within(self.sync.catch_up(), self._ending.left())
        return reason

    async def _watch_trainer(self) -> None:
        """End the run as soon as the trainer is gone, also while nobody asks it for anything."""
        if self._parts.trainer_lost is not None:
            raise await self._parts.trainer_lost()

    async def _train(self) -> str:
        """The train pump; the engines get the trainer's weights first, new ones or those of a checkpoint."""
        await self.publish_first()
        self._throughput.begin()
        self._engines_ready.set()
        return await self.training.run()

    async def _dispatch(self) -> None:
        """The rollout pump, once the engines have the weights that the run begins with."""
        await self._engines_ready.wait()
        await self.rollouts.run()

    def _tell_left_behind(self, pumps: PumpGroup, reason: str | None) -> None:
        """Report what did not finish; if that was a step, its state is unknown, and that is an error."""
        if not pumps.left_behind:
            return
        names = ", ".join(pumps.left_behind)
        seconds = self._ending.limit_seconds
        self._parts.events.emit("left_behind", seconds=seconds, parts=names, **self.diagnosis())
        text = f"{names} did not stop within {seconds:g} s (runtime.timeouts.stop_seconds)"
        if pumps.first_error is not None:
            pumps.first_error.add_note(f"When the run ended because of it, {text}.")
        elif not self.training.between_steps and reason != "interrupted":
            raise RunStuck(
                f"the run ended ({reason}), but {text}, and the open step is lost: {self._told_activities()}"
            )

    def _told_activities(self) -> str:
        return "; ".join(f"{name.replace('_', ' ')} {tell()}" for name, tell in self._parts.activities.items())

    async def can_be_saved(self) -> bool:
        """Whether trainer and controller agree on where they are, between two steps, and the trainer answers.

        After a failure it is not certain: the open step may not have been dropped, or its optimizer may be half done.
        Raises `TrainerLost` if the trainer is gone.
        """
        if not self.training.between_steps:
            return False
        try:
            async with asyncio.timeout(max(self._ending.left(), _LEAST_SECONDS)):
                await self._parts.trainer.publish_weights()
        except TrainerLost:
            raise
        except (TimeoutError, PenstockError):
            return False
        return True

    @property
    def engines_are_current(self) -> bool:
        """Whether the engines have the trainer's weights."""
        clock = self._parts.buffer.clock
        return clock.served_version == clock.trainer_version

    async def snapshot(self) -> ControllerSnapshot:
        """Everything but the trainer; to be taken between two steps, from `after_step` or after `run`."""
        return await self._state.take()

    async def restore(self, saved: SavedController) -> None:
        """Continue from a checkpoint; call it before `run`, with the trainer's own checkpoint already loaded."""
        await self._state.restore(saved)

    async def publish_first(self) -> None:
        """Bring the weights that the run begins with to the engines; `run` does this unless it has been done."""
        if self._weights_due:
            self._weights_due = False
            async with self.sync.changing():
                await self.sync.publish()

    async def _stopped(self) -> str:
        limit = None if self._max_minutes is None else self._max_minutes * 60
        try:
            async with asyncio.timeout(limit):
                await self._stopping.wait()
        except TimeoutError:
            return "max_minutes"
        assert self._stop_reason is not None
        return self._stop_reason

    async def _step_finished(self, finished: FinishedStep) -> None:
        metrics = {"step": float(finished.step_id + 1)} | finished.metrics
        metrics |= self._throughput.of_step(metrics)
        metrics |= {
            "train/version": float(finished.result.version),
            "timing/step_s": finished.seconds,
            "timing/elapsed_s": self._throughput.elapsed,
            **run_totals(self._parts.buffer, self.book.committed, self.drops, self._parts.events.counts),
        }
        if self._parts.use is not None:
            self._parts.use.heard("trainer", finished.result.data_plane)
            metrics |= self._parts.use.of_step()
        self._cut_off.observe(finished.step_id + 1, metrics)
        await self._after_step(finished.step_id + 1, metrics)


def _result(task: asyncio.Task[str]) -> str | None:
    """A task's result, if it has one."""
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None

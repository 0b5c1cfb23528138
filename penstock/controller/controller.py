"""The SingleController: starts the pumps, keeps the throughput accounts, and ends everything in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.config.models import RunConfig
from penstock.controller.advantage_pump import AdvantagePump
from penstock.controller.drops import DropBook
from penstock.controller.dynamic_sampling import DynamicSampling
from penstock.controller.minibatches import Minibatches
from penstock.controller.parts import Parts
from penstock.controller.recording import Recording
from penstock.controller.rollout_pump import RolloutPump
from penstock.controller.throughput import Throughput
from penstock.controller.train_pump import FinishedStep, TrainPump, TrainPumpSettings
from penstock.controller.watchdog import Watchdog
from penstock.controller.weight_sync import WeightSync
from penstock.controller.work_queue import WorkQueue
from penstock.training.targets import needs_preparation, sequence_metrics

AfterStep = Callable[[int, dict[str, float]], Awaitable[None]]
"""Called with the number of finished steps and the step's flat metrics, before the next step begins."""


class SingleController:
    """One CPU-only asyncio object that runs the pumps over the shared buffer.

    The pumps live in one task group: the first that raises ends the others, and `run` raises what it raised. The run
    ends by itself when the data or `max_steps` ends, or when `stop` is called.
    """

    def __init__(self, config: RunConfig, parts: Parts, after_step: AfterStep) -> None:
        self._parts = parts
        self._after_step = after_step
        self._max_minutes = config.training.max_minutes
        self._stop_reason: str | None = None
        self._stopping = asyncio.Event()
        self._throughput = Throughput(parts.engines)
        self.drops = DropBook(config.rollout.failure, config.training.prompt_groups_per_step, parts.events)
        recording = Recording(parts.timeline, parts.buffer, parts.engines)
        work = WorkQueue(parts.stream, parts.buffer)
        self.rollouts = RolloutPump(parts, work, self.drops, config.rollout, recording)
        self.advantages = AdvantagePump(
            parts.data_plane, config.algorithm, config.rollout.sampling.max_new_tokens, parts.timeline
        )
        self.sync = WeightSync(parts, self.rollouts, config.weights.update, recording)
        settings = TrainPumpSettings(
            config.training,
            config.data.partial_step,
            fixed_chunks=config.deterministic,
            prepares=needs_preparation(config.algorithm, config.training),
            minibatches=Minibatches(config.training.minibatches_per_step, sequence_metrics(config.algorithm)),
            filter=DynamicSampling(config.algorithm.dynamic_sampling),
        )
        self.training = TrainPump(
            parts, self.advantages, self.rollouts, self.sync, self.drops, settings, self._step_finished, recording
        )
        self.watchdog = Watchdog(
            self._progress,
            self.diagnosis,
            parts.events,
            stall_seconds=config.rollout.failure.stall_seconds,
            stop=config.rollout.failure.on_stall == "stop",
        )

    def diagnosis(self) -> dict[str, Any]:
        """What every part waits for, for a person to read."""
        buffer = self._parts.buffer
        ages = self.rollouts.inflight_ages()
        return {
            "rollout_pump": f"waits for {self.rollouts.waiting_for}",
            "train_pump": f"waits for {self.training.waiting_for}",
            "groups_in_flight": {group: round(seconds, 1) for group, seconds in ages.items()},
            "gate": "open" if self.rollouts.gate_open else "closed",
            "buffer": f"{buffer.reserved} reserved, {buffer.ready} ready, {buffer.free_permits} permits free",
            "clock": str(buffer.clock),
            "engines": {engine.name: engine.health().value for engine in self._parts.engines},
        }

    def _progress(self) -> tuple[int, ...]:
        buffer = self._parts.buffer
        return (buffer.clock.step, self.rollouts.committed, self.training.chunks_trained, self.drops.dropped)

    def stop(self, reason: str) -> None:
        """End the run now: the open step is aborted, or carried to its end if its optimizer has begun."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._stopping.set()

    async def run(self) -> str:
        """Run to the end; says why it ended (`max_steps`, `data_exhausted`, or the reason given to `stop`)."""
        try:
            async with asyncio.TaskGroup() as pumps:
                background = [
                    pumps.create_task(self.rollouts.run()),
                    pumps.create_task(self.advantages.run()),
                    pumps.create_task(self.watchdog.run()),
                ]
                training = pumps.create_task(self.training.run())
                stopping = pumps.create_task(self._stopped())
                await asyncio.wait({training, stopping}, return_when=asyncio.FIRST_COMPLETED)
                reason = training.result() if training.done() and not training.cancelled() else stopping.result()
                await _end(training, stopping)
                await _end(*background)
        except BaseExceptionGroup as errors:
            first = _first_error(errors)
            raise first from first.__cause__
        await self.sync.catch_up()
        return reason

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
        buffer, counts = self._parts.buffer, self._parts.events.counts
        metrics = {"step": float(finished.step_id + 1)} | finished.metrics
        metrics |= self._throughput.of_step(metrics)
        metrics |= {
            "train/version": float(finished.result.version),
            "timing/step_s": finished.seconds,
            "timing/elapsed_s": time.monotonic() - self._throughput.started,
            "buffer/ready": float(buffer.ready),
            "buffer/reserved": float(buffer.reserved),
            "rollout/groups_dispatched": float(buffer.dispatched),
            "rollout/groups_committed": float(self.rollouts.committed),
            "rollout/groups_evicted": float(counts.get("group_evicted", 0)),
            "rollout/groups_aborted": float(counts.get("group_aborted", 0)),
            "rollout/groups_filtered": float(counts.get("group_filtered", 0)),
            "rollout/groups_retried": float(counts.get("rollout_retried", 0)),
            "rollout/prompts_dropped": float(self.drops.dropped),
            "rollout/prompts_replaced": float(self.drops.dropped if self.drops.returns_quota else 0),
        }
        await self._after_step(finished.step_id + 1, metrics)


async def _end(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of nested task groups."""
    first = errors.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first

"""Starting the parts of a run in threads, so that Ctrl-C is heard while a large model loads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.config.models import RunConfig
from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.data_plane.client import DataPlaneOwner
from penstock.errors import SetupError
from penstock.rollout.row_worker import begin_row_worker
from penstock.run import build, build_trainer
from penstock.run.build import Serving, Training
from penstock.run.build_engines import Processes, begin_processes, end_processes
from penstock.runtime.awake import wait_awake
from penstock.runtime.making import Making
from penstock.runtime.threads import in_daemon_thread
from penstock.runtime.workers.repeated import RepeatedCalls
from penstock.training.interface import Trainer
from penstock.training.workers.front import WorkerTrainer

T = TypeVar("T")
Span = Callable[[str], AbstractContextManager[Any]]
"""Times what a `with` block does under a name."""


@dataclass(frozen=True)
class _Begun:
    """A trainer with its data plane, and other processes that may still be starting."""

    trainer: Trainer
    data_plane: DataPlaneOwner
    row_worker: RepeatedCalls
    processes: Processes

    async def end_trainer(self) -> None:
        """After its `close`: what does not close, because it is stopped or stuck in a call, is killed if it can be."""
        if isinstance(self.trainer, WorkerTrainer):
            await in_daemon_thread("penstock-trainer-end", self.trainer.kill)

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as parts:  # closes each, even if the caller is cancelled meanwhile
            parts.callback(end_processes, self.processes)
            parts.callback(self.data_plane.close)
            parts.push_async_callback(self.row_worker.close)
            parts.push_async_callback(self.end_trainer)
            parts.push_async_callback(self.trainer.close)


@asynccontextmanager
async def parts_of(
    config: RunConfig,
    *,
    span: Span = lambda name: nullcontext(),
    guard: Callable[[Trainer], Trainer] = lambda trainer: trainer,
) -> AsyncIterator[tuple[Serving, Training]]:
    """All parts of a run, closed at the end. An engine that serves a trainer's weights has none of them yet.

    An engine in a process of its own starts first and is waited for last, so it loads its model while the trainer loads
    its own, wherever that is. `guard` may wrap the trainer before anybody uses it. Engine and trainer each have
    `runtime.timeouts.start_seconds`; one that is still loading then is closed once it has loaded, if this process still
    runs.
    """
    timeouts = config.runtime.timeouts
    with span("setting up the trainer"):
        begun = await off_the_loop("the trainer", lambda: _begin(config), lambda made: made.close(), timeouts)
    trainer = guard(begun.trainer)
    async with contextlib.AsyncExitStack() as parts:  # closes each, even if another fails or the caller is cancelled
        parts.callback(begun.data_plane.close)
        parts.push_async_callback(begun.row_worker.close)
        parts.push_async_callback(begun.end_trainer)
        parts.push_async_callback(trainer.close)
        with span("setting up the engine"):
            serving = await off_the_loop(
                "the engine",
                lambda: build_serving(config, begun.processes, trains_too=_trains(config)),
                lambda made: made.close(),
                timeouts,
            )
        parts.push_async_callback(serving.close)
        training = await off_the_loop(
            "the data",
            lambda: build.build_training(config, serving, trainer, begun.data_plane, begun.row_worker),
            _leave,  # its parts are closed with the others
            timeouts,
        )
        yield serving, training


async def off_the_loop(
    what: str, make: Callable[[], T], close: Callable[[T], Coroutine[Any, Any, None]], timeouts: TimeoutsConfig
) -> T:
    """Make something in a thread. If nobody waits for it any more when it is made, it is closed."""
    making = Making("penstock-build", make, lambda made: asyncio.run(close(made)))
    try:
        await wait_awake({making.over}, timeouts.start_seconds)
    except asyncio.CancelledError:
        try:
            await asyncio.wait({making.over}, timeout=timeouts.stop_seconds)
            if making.over.done() and making.over.exception() is None:
                await close(making.take())
        finally:
            making.leave()
        raise
    if not making.over.done():
        making.leave()
        raise SetupError(
            f"{what} was not ready after {timeouts.start_seconds:g} s; if the model takes longer to load, raise "
            "runtime.timeouts.start_seconds"
        )
    return making.take()


async def _leave(_: Training) -> None:
    pass


def _will_read_rows(config: RunConfig) -> bool:
    """Whether every step shows samples, or checkpoints are likely to have rows of ready groups."""
    saves = config.checkpoint.every_steps is not None or config.checkpoint.every_minutes is not None
    return config.observe.samples_per_step > 0 or (saves and not config.deterministic)


def _begin(config: RunConfig) -> _Begun:
    processes = begin_processes(config, awaits_weights=_trains(config))
    with contextlib.ExitStack() as undo:
        undo.callback(end_processes, processes)
        data_plane = build.build_data_plane(config)
        undo.callback(data_plane.close)
        timeouts = config.runtime.timeouts
        row_worker = begin_row_worker(config.data_plane, data_plane, timeouts, at_once=_will_read_rows(config))
        undo.callback(row_worker.kill)
        trainer = build_trainer.build_trainer(config, data_plane)
        begun = _Begun(trainer, data_plane, row_worker, processes)
        undo.pop_all()
    return begun


def _trains(config: RunConfig) -> bool:
    return config.training.backend != "none"


def build_serving(config: RunConfig, processes: Processes, *, trains_too: bool) -> Serving:
    """What generates and scores; processes that were begun for it end if it cannot be built."""
    try:
        return build.build_serving(config, trains_too=trains_too, processes=processes)
    except BaseException:
        end_processes(processes)
        raise

"""A trainer's process that is killed or stopped ends the run with a word that helps, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.config.models import AlgorithmConfig, RunConfig
from penstock.config.reading.loading import dump_config
from penstock.data_plane.client import DataPlaneOwner
from penstock.errors import TrainerLost, TrainerStuck
from penstock.run import build_trainer
from penstock.run.starting import parts_of
from penstock.training.workers.none import NoTrainer
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps
from tests.run.test_trainer_process import APART, DETERMINISTIC, figures
from tests.support.killed_trainers import Kill, kill_trainers
from tests.support.processes import send, wait_until_gone
from tests.support.worker_processes import worker_pid

pytestmark = [pytest.mark.usefixtures("hangups_are_heard"), pytest.mark.long]

STEPS = 6
SAVED = {"checkpoint.every_steps": 1, "training.max_steps": STEPS, "eval.at_start": False, "eval.at_end": False}
LONG = {**APART, "training.max_steps": 1000, "data.train_size": 4000, "eval.at_start": False}
"""Nothing ends such a run by itself while a test waits, and no checkpoint is written."""
WAIT_SECONDS = 240.0


def finished(run_dir: Path) -> int:
    """Steps in the run's metrics."""
    file = run_dir / "metrics.jsonl"
    return file.read_text(encoding="utf-8").count('"train/loss"') if file.exists() else 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


class Signalled:
    """Sends the trainer's process of a run in this process, which does not end by itself, a signal after some steps."""

    def __init__(self, config: RunConfig, number: signal.Signals) -> None:
        self._run_dir, self._number = Path(config.run_dir), number
        self.pid = 0
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        until(lambda: finished(self._run_dir) >= 2)
        self.pid = worker_pid("trainer")
        send(self.pid, self._number)

    def gone(self) -> None:
        """The process it was sent to has ended, and nobody else's is left."""
        self._thread.join(WAIT_SECONDS)
        assert self.pid, "there was a process to send it to"
        wait_until_gone(self.pid)
        assert worker_pid("trainer") == 0


def test_a_kill_ends_the_run_with_the_cause_and_a_resume_trains_what_an_undisturbed_run_does(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = penstock.train(make_config(**DETERMINISTIC, **SAVED, run_dir=str(tmp_path / "whole")))
    config = make_config(**DETERMINISTIC, **SAVED, **APART)
    run_dir = Path(config.run_dir)
    killer = kill_trainers(run_dir, [Kill("train_microbatch", 1)], monkeypatch.setattr)
    said = rf"its process \d+ was ended by SIGKILL\..*Resume with: penstock resume {config.run_dir}$"
    with pytest.raises(TrainerLost, match=said):
        penstock.train(config)
    (killed,) = killer.pids
    wait_until_gone(killed)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "error"
    events = [json.loads(line)["event"] for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert "step_replayed" not in events
    assert penstock.resume(run_dir).stopped_by == "max_steps"
    assert figures(run_dir) == figures(whole.run_dir)
    assert len(steps(run_dir)) == STEPS


def test_a_stopped_process_ends_the_run_by_the_limit_of_its_calls_and_is_killed(make_config: ConfigMaker) -> None:
    config = make_config(**LONG, **{"runtime.timeouts": {"trainer_seconds": 30.0}})
    signalled = Signalled(config, signal.SIGSTOP)
    said = r"did not return within 30 s \(runtime\.timeouts\.trainer_seconds\); its process \d+ is still in it"
    with pytest.raises(TrainerStuck, match=said):
        penstock.train(config)
    signalled.gone()


def test_a_stopped_process_is_killed_after_silence_and_is_lost(make_config: ConfigMaker) -> None:
    config = make_config(**LONG, **{"runtime.timeouts": {"silence_seconds": 20.0}})
    signalled = Signalled(config, signal.SIGSTOP)
    with pytest.raises(TrainerLost, match=r"no sign of life for \d+ s \(runtime\.timeouts\.silence_seconds\)"):
        penstock.train(config)
    signalled.gone()


class Started:
    """`penstock train` in a process of its own, with engine and trainer in processes of theirs."""

    def __init__(self, config: RunConfig) -> None:
        path = Path(config.run_dir).with_suffix(".yaml")
        path.write_text(dump_config(config), encoding="utf-8")
        self.run_dir = Path(config.run_dir)
        self.program = subprocess.Popen(
            [sys.executable, "-m", "penstock", "train", path], stdout=subprocess.DEVNULL, start_new_session=True
        )
        until(lambda: finished(self.run_dir) >= 2 or self.program.poll() is not None)
        assert self.program.poll() is None
        self.workers = [worker_pid(name, self.program.pid) for name in ("trainer", "engine embedded-0")]
        assert all(self.workers)


BOTH = {**LONG, "runtime.engine_process": True}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_however_the_run_is_ended_its_processes_end_with_it(make_config: ConfigMaker, number: signal.Signals) -> None:
    run = Started(make_config(**BOTH))
    try:
        run.program.send_signal(number)
        run.program.wait(WAIT_SECONDS)
    finally:
        run.program.kill()
    for pid in run.workers:
        wait_until_gone(pid)
    saved = [path.name for path in (run.run_dir / "checkpoints").glob("step_*")]
    assert (len(saved) == 1) is (number is not signal.SIGKILL), "a run that is asked to end saves its last step"


def test_signals_to_all_processes_still_leave_a_checkpoint(make_config: ConfigMaker) -> None:
    run = Started(make_config(**BOTH))
    for pid in (*run.workers, run.program.pid):
        send(pid, signal.SIGTERM)
    run.program.wait(WAIT_SECONDS)
    for pid in run.workers:
        wait_until_gone(pid)
    assert len(list((run.run_dir / "checkpoints").glob("step_*"))) == 1


def test_a_stopped_trainer_ends_with_a_controller_that_is_killed(make_config: ConfigMaker) -> None:
    run = Started(make_config(**BOTH))
    send(run.workers[0], signal.SIGSTOP)
    run.program.kill()
    run.program.wait(WAIT_SECONDS)
    for pid in run.workers:
        wait_until_gone(pid)


async def test_an_interrupt_while_it_is_built_leaves_no_process(make_config: ConfigMaker) -> None:
    async def begin() -> None:
        async with parts_of(make_config(**BOTH)):
            pytest.fail("it is interrupted first")

    building = asyncio.ensure_future(begin())
    while not (pid := worker_pid("trainer")):  # noqa: ASYNC110 - another process, which takes seconds to be ready
        await asyncio.sleep(0.01)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    wait_until_gone(pid)
    assert worker_pid("engine embedded-0") == 0


async def test_a_second_interrupt_while_a_cancelled_start_closes_leaves_no_process(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, closing = threading.Event(), asyncio.Event()

    class NeverClosed(NoTrainer):
        async def close(self) -> None:
            closing.set()
            await asyncio.Event().wait()

    def build(_: RunConfig, plane: DataPlaneOwner) -> NoTrainer:
        loads.wait(WAIT_SECONDS)
        return NeverClosed(plane, AlgorithmConfig())

    async def begin() -> None:
        async with parts_of(make_config(**APART, **{"runtime.engine_process": True})):
            pytest.fail("it is interrupted first")

    monkeypatch.setattr(build_trainer, "build_trainer", build)
    building = asyncio.ensure_future(begin())
    while not (pid := worker_pid("data plane worker")):  # noqa: ASYNC110 - a thread starts it
        await asyncio.sleep(0.01)
    building.cancel()
    loads.set()
    await asyncio.wait_for(closing.wait(), WAIT_SECONDS)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    wait_until_gone(pid)
    assert worker_pid("engine embedded-0") == 0

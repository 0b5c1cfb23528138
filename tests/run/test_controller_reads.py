"""Rows do not pass through the controller: what its process reads from the data plane, counted byte by byte."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.controller.bookkeeping.snapshot import SavedController
from penstock.data_plane import archive, fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.client import ShmDataPlane
from penstock.data_plane.narrow import column_bytes
from penstock.data_plane.row_files import RowsSummary
from penstock.rollout.recorded import Recording, RecordingFolder
from penstock.rollout.sample_texts import ReadSample
from penstock.runtime.workers import WorkerHandle, start
from penstock.runtime.workers.repeated import RepeatedCalls
from tests.run.conftest import ConfigMaker
from tests.support.processes import alive

CONTROLLER = "penstock.data_plane.narrow"
"""The controller's own client."""
NOT_READERS = tuple(
    f"penstock.{name}" for name in ("data_plane.client", "data_plane.adapters", "data_plane.observing", "runtime")
)
PER_SAMPLE = 4 + 8 + 1 + 4
"""Reward, length, whether it was truncated, and its mask."""
EVERYTHING = {
    "rollout.record": True,
    "observe.samples_per_step": 2,
    "checkpoint.every_steps": 1,
    "checkpoint.keep_latest": 5,
    "training.max_steps": 3,
    "staleness": {"policy": "windowed", "max_staleness": 2},
}
"""Everything is on that once passed through the controller: recording, kept samples, checkpoints with ready groups."""

SHM = {"data_plane.adapter": "shm", "data_plane.capacity_gb": 0.05}


class Reads:
    """Who reads which fields of how many bytes: the innermost caller outside the data plane's own interface."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, adapter: type[MemoryDataPlane | ShmDataPlane]) -> None:
        self.bytes: dict[str, Counter[str]] = defaultdict(Counter)
        self.archives = 0
        """How often rows on disk were read or written here."""
        plain = adapter.get_samples

        def counted(plane: Any, meta: Any, names: Any) -> Any:
            reader = _reader()
            batch = plain(plane, meta, names)
            for name, column in batch.columns.items():
                self.bytes[reader][name] += column_bytes(column)
            return batch

        async def counted_too(plane: Any, meta: Any, names: Any) -> Any:
            return counted(plane, meta, names)  # in the caller's own stack, which says who it is

        def noted(function: Any) -> Any:
            def noting(*args: Any) -> Any:
                self.archives += 1
                return function(*args)

            return noting

        monkeypatch.setattr(adapter, "get_samples", counted)
        monkeypatch.setattr(adapter, "get_samples_async", counted_too)
        for name in ("load_file", "save"):
            monkeypatch.setattr(archive, name, noted(getattr(archive, name)))

    def check(self, config: RunConfig, run_dir: Path) -> None:
        """The controller has read one number per sample and field, and checkpoints have added nothing."""
        steps = int(lines(run_dir / "metrics.jsonl")[-1]["step"])
        samples = steps * config.training.prompt_groups_per_step * config.rollout.group_size
        assert steps == 3
        assert self.bytes.pop(CONTROLLER).total() == PER_SAMPLE * samples
        assert not [name for name in self.bytes if name.startswith(("penstock.controller", "penstock.run"))]
        # The recording is written when the rows are.
        assert not self.bytes.keys() & {"penstock.rollout.recording_writer", "penstock.rollout.manager"}
        assert len(Recording.read(run_dir).groups) >= steps * config.training.prompt_groups_per_step
        assert len(lines(run_dir / "samples.jsonl")) == 2 * steps


def _reader() -> str:
    frame = sys._getframe(1)
    while True:
        name = str(frame.f_globals["__name__"])
        if name.startswith("penstock.") and not name.startswith(NOT_READERS):
            return name
        assert frame.f_back is not None, "nobody of ours reads"
        frame = frame.f_back


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_controller_reads_one_number_per_sample_and_a_checkpoint_adds_nothing(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch, MemoryDataPlane)
    config = make_config(**EVERYTHING)
    result = penstock.train(config)
    reads.check(config, result.run_dir)
    # Texts are read by a worker, here in a thread.
    assert reads.bytes["penstock.rollout.sample_texts"][fields.RESPONSE_TEXT] > 0


class Worker:
    """What the worker that reads rows in another process is asked and answers, and its end by a kill."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kill_before: tuple[str, ...] = ()) -> None:
        self.answers: dict[str, list[Any]] = defaultdict(list)
        self.killed: list[int] = []
        self.pids: set[int] = set()
        due, striking = set(kill_before), threading.Lock()
        call, call_blocking = RepeatedCalls.call, RepeatedCalls.call_blocking

        def strike(calls: RepeatedCalls, method: str) -> None:
            # Calls come from several threads: two may find the same process, before either has it replaced.
            with striking:
                pid = calls.pid
                if method in due and pid is not None and pid not in self.killed:
                    due.remove(method)
                    self.killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

        def note(calls: RepeatedCalls, method: str, answer: Any) -> Any:
            self.answers[method].append(answer)
            self.pids.add(int(calls.pid or 0))
            return answer

        async def noted(calls: RepeatedCalls, method: str, *args: Any, **kwargs: Any) -> Any:
            strike(calls, method)
            return note(calls, method, await call(calls, method, *args, **kwargs))

        def noted_too(calls: RepeatedCalls, method: str, *args: Any, **kwargs: Any) -> Any:
            strike(calls, method)
            return note(calls, method, call_blocking(calls, method, *args, **kwargs))

        monkeypatch.setattr(RepeatedCalls, "call", noted)
        monkeypatch.setattr(RepeatedCalls, "call_blocking", noted_too)

    def check(self) -> None:
        """Nothing but the texts that are shown, and how many rows an archive has."""
        assert os.getpid() not in self.pids
        assert not [pid for pid in self.pids if alive(pid)], "it ends with the run"
        for method, answers in self.answers.items():
            for answer in answers:
                if method == "read_samples":
                    assert [type(each) for each in answer] == [ReadSample, ReadSample]
                else:
                    assert answer is None or isinstance(answer, RowsSummary)


@pytest.mark.long
def test_with_shared_memory_its_process_reads_nothing_else_at_all(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even from disk: archives of rows are written, read through and restored by the worker."""
    reads, worker = Reads(monkeypatch, ShmDataPlane), Worker(monkeypatch)
    recorded: list[object] = []
    write = RecordingFolder.write
    monkeypatch.setattr(RecordingFolder, "write", lambda *args: (recorded.append(args), write(*args)))
    config = make_config(**EVERYTHING, **SHM, **{"runtime.trainer_process": True})
    result = penstock.train(config)
    reads.check(config, result.run_dir)
    assert not reads.bytes
    assert len(worker.answers["read_samples"]) == 3
    penstock.resume(result.run_dir, ["training.max_steps=4"])
    assert set(reads.bytes) == {CONTROLLER}
    # Only the recording is written here, from rows that are in hand; groups are recorded again after a resume.
    assert reads.archives == len(recorded)
    worker.check()


@pytest.mark.long
def test_a_worker_that_is_killed_again_and_again_costs_nothing_but_its_start(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(monkeypatch, kill_before=("read_samples", "save_rows"))
    config = make_config(**EVERYTHING, **SHM)
    result = penstock.train(config)
    events = lines(result.run_dir / "events.jsonl")
    told = [event for event in events if event["event"] == "row_worker_restarted"]
    assert len(told) == len(worker.killed) >= 1
    assert all("SIGKILL" in event["cause"] for event in told)
    assert not [event for event in events if event["event"] in ("samples_not_kept", "run_failed")]
    assert len(lines(result.run_dir / "samples.jsonl")) == 6
    for number in (1, 2, 3):
        saved = SavedController.read(result.run_dir / "checkpoints" / f"step_{number}" / "controller")
        if saved.rows is not None:
            assert len(archive.load_rows(saved.rows).sample_ids) == 3 * len(saved.state.ready)
    worker.check()


@pytest.mark.long
def test_a_worker_that_is_never_ready_costs_samples_and_nothing_else(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.controller.bookkeeping.kept_samples._READ_SECONDS", 0.5)
    stopped: list[int] = []

    def start_stopped(*args: Any, **kwargs: Any) -> WorkerHandle:
        handle = start(*args, **kwargs)
        os.kill(handle.pid, signal.SIGSTOP)
        stopped.append(handle.pid)
        return handle

    monkeypatch.setattr("penstock.rollout.row_worker.start", start_stopped)
    result = penstock.train(make_config(**SHM, **{"observe.samples_per_step": 2, "training.max_steps": 3}))
    assert result.stopped_by == "max_steps"
    events = lines(result.run_dir / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "samples_not_kept"] == [1, 2, 3]
    assert [alive(pid) for pid in stopped] == [False]

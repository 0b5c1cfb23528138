"""Runs with a part that gets stuck end by themselves in bounded time, name it, and can be resumed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from penstock.errors import EngineError, RunStalled, TrainerStuck, WeightSyncError
from penstock.run.checkpoint import checkpoints
from tests.run.conftest import ConfigMaker
from tests.run.test_resume import LETTERS, ends, lines, write_prompts
from tests.support.processes import wait_until_gone
from tests.support.program import Program
from tests.support.stuck_parts import get_stuck

PROMPTS = 24
STOP_SECONDS = 3.0


@pytest.fixture
def config(make_config: ConfigMaker, tmp_path: Path) -> Any:
    """A run with an engine's process and short limits, all of whose prompts are to be trained."""

    def make(**changes: Any) -> RunConfig:
        return make_config(
            **{
                "data": {"train_path": write_prompts(tmp_path, PROMPTS)},
                "rollout.environment": LETTERS,
                "rollout.failure": {"backoff_seconds": 0},
                "training.max_steps": None,
                "runtime.engine_process": True,
                "runtime.timeouts": {"stop_seconds": STOP_SECONDS},
                "checkpoint.every_steps": 2,
                "eval": {"at_start": False, "at_end": False},
            }
            | changes
        )

    return make


STOPS = {"rollout.failure": {"backoff_seconds": 0, "stall_seconds": 3.0, "on_stall": "stop"}}


def summary_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found


def saved_step(run_dir: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run_dir / "checkpoints")), default=0)


def check_resumed(run_dir: Path) -> None:
    """Go on to the end: every prompt has come to one end, and every step has its line."""
    penstock.resume(run_dir)
    assert ends(run_dir) == Counter({(0, str(number)): 1 for number in range(1, PROMPTS + 1)})
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(1, PROMPTS // 4 + 1))


class TestStoppedEngine:
    @pytest.mark.parametrize(
        ("kind", "call", "resumes"),
        [
            ("update", 2, False),
            pytest.param("update", 4, True, marks=pytest.mark.long),
            pytest.param("generation", 30, True, marks=pytest.mark.long),
        ],
    )
    def test_a_stall_stops_the_run_with_its_name_and_a_checkpoint(
        self, config: Any, monkeypatch: pytest.MonkeyPatch, kind: str, call: int, resumes: bool
    ) -> None:
        engines = get_stuck(kind, call, monkeypatch.setattr)
        settings = config(**STOPS)
        began = time.monotonic()
        with pytest.raises(
            RunStalled, match=r"embedded-0 silent for \d+ s \(process \d+ does not answer; it may be stop"
        ):
            penstock.train(settings)
        assert time.monotonic() - began < 40
        run_dir = Path(settings.run_dir)
        summary = summary_of(run_dir)
        assert summary["stopped_by"] == "error"
        assert "does not answer; it may be stopped" in summary["error"]
        assert saved_step(run_dir) == summary["steps"] > 0
        wait_until_gone(engines[0].pid)
        if resumes:
            monkeypatch.undo()
            check_resumed(run_dir)

    @pytest.mark.long
    @pytest.mark.parametrize(("kind", "call"), [("update", 4), ("generation", 30)])
    def test_without_a_limit_on_stalls_its_silence_has_it_replaced_and_the_run_goes_on(
        self, config: Any, monkeypatch: pytest.MonkeyPatch, kind: str, call: int
    ) -> None:
        engines = get_stuck(kind, call, monkeypatch.setattr)
        settings = config(**{"runtime.timeouts": {"silence_seconds": 2.0}})
        assert penstock.train(settings).stopped_by == "data_exhausted"
        run_dir = Path(settings.run_dir)
        assert ends(run_dir) == Counter({(0, str(number)): 1 for number in range(1, PROMPTS + 1)})
        (lost,) = (line for line in lines(run_dir / "events.jsonl") if line["event"] == "engine_lost")
        assert "showed no sign of life" in lost["cause"]
        assert "runtime.timeouts.silence_seconds" in lost["cause"]
        wait_until_gone(engines[0].pid)

    @pytest.mark.long
    @pytest.mark.parametrize(("kind", "call"), [("update", 4), ("generation", 30)])
    def test_without_replacements_its_silence_ends_the_run(
        self, config: Any, monkeypatch: pytest.MonkeyPatch, kind: str, call: int
    ) -> None:
        get_stuck(kind, call, monkeypatch.setattr)
        settings = config(
            **{"runtime.timeouts": {"silence_seconds": 2.0}, "rollout.failure": {"engine_replacements": 0}}
        )
        with pytest.raises((WeightSyncError, EngineError), match=r"showed no sign of life for \d+ s") as caught:
            penstock.train(settings)
        assert "runtime.timeouts.silence_seconds" in str(caught.value)
        assert saved_step(Path(settings.run_dir)) == summary_of(Path(settings.run_dir))["steps"] > 0
        monkeypatch.undo()
        check_resumed(Path(settings.run_dir))

    @pytest.mark.long
    @pytest.mark.parametrize(("kind", "call"), [("update", 4), ("generation", 30)])
    def test_the_limit_on_time_ends_it(
        self, config: Any, monkeypatch: pytest.MonkeyPatch, kind: str, call: int
    ) -> None:
        get_stuck(kind, call, monkeypatch.setattr)
        settings = config(**{"training.max_minutes": 0.15, "eval": {"at_start": False, "at_end": True}})
        assert penstock.train(settings).stopped_by == "max_minutes"
        assert saved_step(Path(settings.run_dir)) == summary_of(Path(settings.run_dir))["steps"] > 0
        monkeypatch.undo()
        check_resumed(Path(settings.run_dir))

    @pytest.mark.long
    def test_one_that_goes_on_in_time_has_lost_nothing(self, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engines = get_stuck("update", 4, monkeypatch.setattr)
        settings = config(**{"rollout.failure": {"stall_seconds": 3.0}, "runtime.timeouts": {"silence_seconds": 30.0}})
        told: list[str] = []

        def go_on(event: str, facts: Any) -> None:
            if event == "stalled" and "silent" in str(facts["engines"]):
                told.append(facts["engines"]["embedded-0"])
                os.kill(engines[0].pid, signal.SIGCONT)

        monkeypatch.setattr("penstock.observe.console.SilentView.on_event", lambda self, *event: go_on(*event))
        assert penstock.train(settings).stopped_by == "data_exhausted"
        assert told
        run_dir = Path(settings.run_dir)
        assert ends(run_dir) == Counter({(0, str(number)): 1 for number in range(1, PROMPTS + 1)})
        names = {line["event"] for line in lines(run_dir / "events.jsonl")}
        assert not names & {"engine_out_of_service", "rollout_retried", "left_behind", "run_failed"}


class TestStuckTrainer:
    @pytest.mark.parametrize("kind", [pytest.param("microbatch", marks=pytest.mark.long), "finish"])
    def test_a_stall_stops_the_run_and_names_the_call(
        self, config: Any, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        get_stuck(kind, 4, monkeypatch.setattr)
        changes = {"runtime.engine_process": False, "training.min_groups_per_chunk": 4}
        soon = {
            "runtime.timeouts": {"stop_seconds": 1.0},
            "rollout.failure": {"stall_seconds": 0.7, "on_stall": "stop"},
        }
        settings = config(**changes, **soon)
        with pytest.raises(RunStalled, match=rf"trainer: in \w*{kind}\w* for \d"):
            penstock.train(settings)
        run_dir = Path(settings.run_dir)
        [left] = [line for line in lines(run_dir / "events.jsonl") if line["event"] == "left_behind"]
        assert left["parts"] == "train pump"
        assert saved_step(run_dir) == 2, "what is stuck in a step is not saved"
        if kind == "microbatch":
            monkeypatch.undo()
            check_resumed(run_dir)

    @pytest.mark.long
    def test_a_call_beyond_its_limit_ends_the_run_and_is_not_repeated(
        self, config: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        get_stuck("microbatch", 3, monkeypatch.setattr)
        settings = config(**{"runtime.timeouts": {"trainer_seconds": 2.0}, "runtime.engine_process": False})
        with pytest.raises(TrainerStuck, match=r"train_microbatch did not return within 2 s \(runtime\.timeouts"):
            penstock.train(settings)
        names = [line["event"] for line in lines(Path(settings.run_dir) / "events.jsonl")]
        assert "step_replayed" not in names
        assert "left_behind" not in names


class Started(Program):
    """`penstock train` in a process of its own, with a part that gets stuck."""

    def __init__(self, config: RunConfig, kind: str, call: int) -> None:
        self.run_dir = Path(config.run_dir)
        path = self.run_dir.with_name("run.yaml")
        path.write_text(dump_config(config), encoding="utf-8")
        super().__init__([sys.executable, "-m", "tests.support.stuck_parts", kind, str(call), str(path)])


PLAIN = {"observe.console": "plain"}
REPORTS = {"rollout.failure": {"backoff_seconds": 0, "stall_seconds": 3.0}}


class TestCtrlC:
    @pytest.mark.long
    @pytest.mark.parametrize(("kind", "call"), [("update", 4), ("generation", 30)])
    def test_the_first_ends_a_run_whose_engine_is_stopped(self, config: Any, kind: str, call: int) -> None:
        with Started(config(**PLAIN, **REPORTS), kind, call) as run:
            run.until("it may be stopped")
            run.send(signal.SIGINT)
            code, told = run.ended()
        assert code == 130, told
        summary = summary_of(run.run_dir)
        assert summary["stopped_by"] == "interrupted"
        assert saved_step(run.run_dir) == summary["steps"] > 0
        check_resumed(run.run_dir)

    @pytest.mark.long
    def test_the_first_ends_a_run_whose_trainer_is_stuck(self, config: Any) -> None:
        with Started(config(**PLAIN, **REPORTS, **{"runtime.engine_process": False}), "finish", 4) as run:
            run.until("trainer: in finish_train_step for")
            run.send(signal.SIGINT)
            code, told = run.ended()
        assert code == 130, told
        assert "no last checkpoint: the trainer does not respond" in told
        assert saved_step(run.run_dir) == 2
        check_resumed(run.run_dir)

    @pytest.mark.long
    def test_the_second_waits_for_nothing(self, config: Any) -> None:
        patient = {"runtime.timeouts": {"stop_seconds": 500.0}, "runtime.engine_process": False}
        with Started(config(**PLAIN, **REPORTS, **patient), "finish", 3) as run:
            run.until("trainer: in finish_train_step for")
            run.send(signal.SIGINT)
            run.until("Ctrl-C again exits at once")
            run.send(signal.SIGINT)
            code, told = run.ended()
        assert code == 130, told
        assert summary_of(run.run_dir)["stopped_by"] == "interrupted"

    @pytest.mark.long
    @pytest.mark.parametrize("patience", [1.0, 500.0])
    def test_it_is_heard_while_the_event_loop_is_blocked(self, config: Any, patience: float) -> None:
        changes = {"runtime.timeouts": {"stop_seconds": patience}, "runtime.engine_process": False}
        with Started(config(**PLAIN, **REPORTS, **changes), "loop", 40) as run:
            run.until("event loop: blocked")
            (run.send if patience == 1.0 else run.insist)(signal.SIGINT)
            code, told = run.ended()
        assert code == 130, told
        assert "interrupted while the event loop was blocked in " in told
        assert "in block <- " in told
        assert summary_of(run.run_dir)["stopped_by"] == "interrupted"

    @pytest.mark.long
    @pytest.mark.parametrize("patience", [1.0, 500.0])
    def test_it_ends_a_process_in_which_nothing_can_run(self, config: Any, patience: float) -> None:
        changes = {"runtime.timeouts": {"stop_seconds": patience}, "runtime.engine_process": False}
        with Started(config(**PLAIN, **changes), "lock", 40) as run:
            run.until("a thread takes the lock")
            for _ in range(1 if patience == 1.0 else 2):
                time.sleep(0.5)
                run.send(signal.SIGINT)
            code, told = run.ended()
        assert code == -signal.SIGKILL, told
        assert "the interpreter was blocked, so the run was killed" in told
        assert "in freeze_from_a_thread" in (run.run_dir / "frozen.txt").read_text()
        check_resumed(run.run_dir)
        assert not (run.run_dir / "frozen.txt").exists()


class TestNothingRuns:
    @pytest.mark.long
    def test_a_blocked_event_loop_ends_with_the_place(self, config: Any) -> None:
        with Started(config(**PLAIN, **STOPS, **{"runtime.engine_process": False}), "loop", 40) as run:
            code, told = run.ended()
        assert code == 1, told
        assert "RunStalled: the event loop is blocked" in told
        summary = summary_of(run.run_dir)
        assert summary["stopped_by"] == "error"
        assert "in block <- " in summary["error"]
        check_resumed(run.run_dir)

    @pytest.mark.long
    def test_a_frozen_interpreter_ends_with_the_stacks_of_all_threads(self, config: Any) -> None:
        stops = {"rollout.failure": {"stall_seconds": 0.5, "on_stall": "stop"}}
        limits = {"runtime.timeouts": {"stop_seconds": 0.5}, "runtime.engine_process": False}
        with Started(config(**PLAIN, **stops, **limits), "interpreter", 40) as run:
            code, told = run.ended()
        assert code == 1, told
        stacks = (run.run_dir / "frozen.txt").read_text()
        assert "stuck_parts.py" in stacks
        assert "in freeze" in stacks
        check_resumed(run.run_dir)
        assert not (run.run_dir / "frozen.txt").exists()

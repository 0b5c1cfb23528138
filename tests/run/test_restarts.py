"""A run that has lost its trainer goes back to its last checkpoint by itself, and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, DataPlaneLost, NonFiniteError, TrainerLost
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.run import build_engines
from penstock.run.signals import StopSignals
from tests.run.conftest import ConfigMaker
from tests.run.test_resume import DETERMINISTIC, ends, lines, trained, write_prompts
from tests.support.loggers import Remembering
from tests.support.lost_parts import losing_trainers, lost
from tests.support.trace_checks import check_trace

Plan = list[tuple[str, int]]
long = pytest.mark.long


def restarting(folder: Path, restarts: int = 3, prompts: int = 24) -> dict[str, Any]:
    """A deterministic run of a step for every four prompts, with a checkpoint after each."""
    return DETERMINISTIC | {"runtime.restarts": restarts, "data.train_path": write_prompts(folder, prompts)}


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "events.jsonl") if line["event"] == name]


def assert_same(run_dir: Path, whole: Path, steps: int) -> None:
    assert trained(run_dir) == trained(whole)
    assert ends(run_dir) == ends(whole)
    assert set(ends(run_dir).values()) == {1}
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))
    last = f"checkpoints/step_{steps}/model.safetensors"
    assert (run_dir / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ([("finish_train_step", 2)], 3),
        pytest.param([("publish_weights", 4), ("snapshot", 1), ("begin_train_step", 2)], 6, marks=long),
        pytest.param([("train_microbatch", 10), ("load_checkpoint", 1), ("publish_weights", 1)], 6, marks=long),
    ],
)
def test_a_run_that_lost_its_trainer_ends_as_if_nothing_had_happened(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan, steps: int
) -> None:
    changes = restarting(tmp_path, prompts=4 * steps)
    whole = penstock.train(make_config(**changes, run_dir=str(tmp_path / "whole"))).run_dir
    logger = Remembering()
    with losing_trainers(monkeypatch, *plan) as trainers:
        result = penstock.train(make_config(**changes), loggers=[logger])
    assert len(trainers) == len(plan) + 1
    assert (result.stopped_by, result.summary["restarts"]) == ("data_exhausted", len(plan))
    assert_same(result.run_dir, whole, steps)
    restarts = events(result.run_dir, "run_restarted")
    assert [(event["lost"], event["restart"], event["of"]) for event in restarts] == [
        ("trainer", number, 3) for number in range(1, len(plan) + 1)
    ]
    assert all("TrainerLost" in event["cause"] for event in restarts)
    assert not any("penstock resume" in event["cause"] for event in restarts), "it goes on by itself"
    assert "restarts" not in json.loads((whole / "summary.json").read_text())
    assert [call[0] for call in logger.calls if call[0] != "log"] == ["start", "summary", "close"]
    assert penstock.report(result.run_dir).figures["restarts"] == len(plan)
    check_trace(json.loads((result.run_dir / "trace.json").read_text()))
    assert not (result.run_dir / "trace.1.json").exists(), "one process has one timeline"


@long
def test_the_old_engine_is_gone_before_the_new_one_is_built(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has room for one of them."""
    engines: list[weakref.ref[EmbeddedEngine]] = []
    alive_when_built: list[int] = []

    class Watched(EmbeddedEngine):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> EmbeddedEngine:
            alive_when_built.append(sum(engine() is not None for engine in engines))
            engine = super().from_pretrained(*args, **kwargs)
            engines.append(weakref.ref(engine))
            return engine

    monkeypatch.setitem(build_engines._ENGINES, "embedded", Watched.from_pretrained)
    gc.disable()
    try:
        with losing_trainers(monkeypatch, ("finish_train_step", 3), ("publish_weights", 2)):
            penstock.train(make_config(**restarting(tmp_path)))
    finally:
        gc.enable()
    assert alive_when_built == [0, 0, 0]


@long
def test_a_loss_beyond_the_limit_ends_the_run_with_it_and_a_resume_goes_on(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = restarting(tmp_path, restarts=1)
    whole = penstock.train(make_config(**changes, run_dir=str(tmp_path / "whole"))).run_dir
    plan = [("finish_train_step", 3), ("finish_train_step", 2)]
    with losing_trainers(monkeypatch, *plan) as trainers, pytest.raises(TrainerLost, match="killed by SIGKILL"):
        penstock.train(make_config(**changes))
    run_dir = tmp_path / "run"
    assert len(trainers) == 2
    (refused,) = events(run_dir, "run_not_restarted")
    assert refused["reason"] == "runtime.restarts = 1, and it was used"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["stopped_by"], summary["restarts"]) == ("error", 1)
    penstock.resume(run_dir)
    assert_same(run_dir, whole, 6)


def test_without_a_checkpoint_a_loss_ends_the_run_and_says_so(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = restarting(tmp_path) | {"observe.console": "plain"}
    with losing_trainers(monkeypatch, ("finish_train_step", 1)) as trainers, pytest.raises(TrainerLost):
        penstock.train(make_config(**changes))
    assert len(trainers) == 1
    assert not events(tmp_path / "run", "run_restarted")
    reason = "there is no complete checkpoint to go back to yet"
    assert events(tmp_path / "run", "run_not_restarted")[0]["reason"] == reason
    assert f"the trainer was lost, and the run cannot go back by itself: {reason}" in capsys.readouterr().out


def test_restarts_without_checkpoints_to_go_back_to_are_refused(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.restarts: has no effect without checkpoints to go back to"):
        make_config(**{"runtime.restarts": 1, "checkpoint": {"every_minutes": None}})


@long
def test_a_lost_data_plane_sends_a_run_back_at_once(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = restarting(tmp_path)
    whole = penstock.train(make_config(**changes, run_dir=str(tmp_path / "whole"))).run_dir

    def error() -> Exception:
        raise RuntimeError("a chunk could not be fetched") from DataPlaneLost("the owner of the rows is gone")

    with losing_trainers(monkeypatch, ("train_microbatch", 10), error=error):
        run_dir = penstock.train(make_config(**changes)).run_dir
    (restart,) = events(run_dir, "run_restarted")
    assert restart["lost"] == "data plane"
    assert_same(run_dir, whole, 6)


@long
@pytest.mark.parametrize("error", [NonFiniteError("nan"), RuntimeError("a bug"), MemoryError("no room")])
def test_errors_of_a_trainer_that_lives_are_no_loss(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plan = ("finish_train_step", 3)
    with losing_trainers(monkeypatch, plan, error=lambda: error) as trainers, pytest.raises(type(error)):
        penstock.train(make_config(**restarting(tmp_path)))
    assert len(trainers) == 1
    assert not events(tmp_path / "run", "run_restarted")
    assert not events(tmp_path / "run", "run_not_restarted")


@long
def test_a_signal_between_loss_and_checkpoint_ends_the_run_which_can_be_resumed(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = restarting(tmp_path)
    whole = penstock.train(make_config(**changes, run_dir=str(tmp_path / "whole"))).run_dir
    interrupt = {1: lambda: os.kill(os.getpid(), signal.SIGINT)}
    with losing_trainers(monkeypatch, ("finish_train_step", 3), when_built=interrupt):
        result = penstock.train(make_config(**changes))
    assert (result.stopped_by, result.summary["steps"], result.summary["restarts"]) == ("interrupted", 2, 1)
    assert not events(result.run_dir, "run_failed")
    penstock.resume(result.run_dir)
    assert_same(result.run_dir, whole, 6)


@long
def test_a_run_that_was_told_to_stop_does_not_start_over(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = asyncio.Event()
    received = StopSignals._received

    def note(self: StopSignals, number: signal.Signals) -> None:
        received(self, number)
        heard.set()

    async def interrupted() -> Exception:
        if not heard.is_set():
            os.kill(os.getpid(), signal.SIGINT)
        await heard.wait()
        return lost()

    monkeypatch.setattr(StopSignals, "_received", note)
    plan = ("finish_train_step", 3)
    with losing_trainers(monkeypatch, plan, error=interrupted) as trainers, pytest.raises(TrainerLost):
        penstock.train(make_config(**restarting(tmp_path)))
    assert len(trainers) == 1


@long
def test_a_damaged_checkpoint_is_not_gone_back_to(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = tmp_path / "run/checkpoints/step_3"

    async def error() -> Exception:
        while not newest.exists():  # noqa: ASYNC110 - a file tells nobody that it is there
            await asyncio.sleep(0.01)
        with (newest / "model.safetensors").open("r+b") as file:
            file.write(b"\0")
        return lost()

    with losing_trainers(monkeypatch, ("finish_train_step", 4), error=error) as trainers, pytest.raises(TrainerLost):
        penstock.train(make_config(**restarting(tmp_path)))
    assert len(trainers) == 1
    (refused,) = events(tmp_path / "run", "run_not_restarted")
    assert refused["reason"].startswith("the last checkpoint cannot be used: SetupError: checkpoint step_3")


@long
def test_a_resumed_run_that_is_lost_before_its_next_checkpoint_goes_back_to_the_one_it_resumed_from(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = restarting(tmp_path)
    whole = penstock.train(make_config(**changes, run_dir=str(tmp_path / "whole"))).run_dir
    run_dir = penstock.train(make_config(**changes | {"training.max_steps": 3})).run_dir
    with losing_trainers(monkeypatch, ("finish_train_step", 1)):
        result = penstock.resume(run_dir, ["training.max_steps=null"])
    assert [event["step"] for event in events(run_dir, "run_restarted")] == [3]
    assert result.nothing_left is None
    assert_same(run_dir, whole, 6)

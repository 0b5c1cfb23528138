"""Before the first step a checkpoint is written on trial: what cannot be saved is found before anything is trained."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.errors import CheckpointError
from penstock.run import checkpoint
from penstock.run.checkpoint import CheckpointStore
from penstock.run.checkpoint_proof import write_and_read_off_the_loop
from tests.run.conftest import ConfigMaker
from tests.run.test_checkpoint_store import assert_true, make_store, snapshot
from tests.run.test_resume import DETERMINISTIC, lines, trained, write_prompts
from tests.support.tiny_models import save_tiny_model

QUICK: dict[str, Any] = {"eval.at_start": False, "eval.at_end": False}
NEVER: dict[str, Any] = {"at_end": False, "every_minutes": None}


def events(run_dir: Path) -> list[dict[str, Any]]:
    return lines(run_dir / "events.jsonl")


def names(run_dir: Path) -> list[str]:
    return [event["event"] for event in events(run_dir)]


def test_a_checkpoint_is_tried_before_the_first_step_and_again_on_resume(make_config: ConfigMaker) -> None:
    run_dir = penstock.train(make_config(**QUICK)).run_dir
    penstock.resume(run_dir, ["training.max_steps=4"])
    found = [event for event in events(run_dir) if event["event"] == "checkpoint_proved"]
    assert [event["step"] for event in found] == [0, 3]
    first = names(run_dir)
    assert first.index("checkpoint_proved") < first.index("weights_published")
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_3", "step_4"]
    real = sum(path.stat().st_size for path in (run_dir / "checkpoints/step_3").rglob("*") if path.is_file())
    assert found[1]["bytes"] == pytest.approx(real, rel=0.05)
    content = json.loads((run_dir / "trace.json").read_text())
    spans = [span for span in content if span["ph"] == "B" and span["name"].startswith("testing that a checkpoint")]
    assert [span["args"]["step"] for span in spans] == [3]


@pytest.mark.parametrize("left", ["no checkpoints", "nothing to train"])
def test_what_will_write_no_checkpoint_tries_none(make_config: ConfigMaker, left: str) -> None:
    if left == "no checkpoints":
        run_dir = penstock.train(make_config(**QUICK, checkpoint=NEVER)).run_dir
        assert names(run_dir).count("checkpoint_proved") == 0
        assert not (run_dir / "checkpoints").exists()
    else:
        run_dir = penstock.train(make_config(**QUICK)).run_dir
        penstock.resume(run_dir)
        assert names(run_dir).count("checkpoint_proved") == 1


def test_a_folder_that_cannot_be_written_ends_the_run_before_anything_is_trained(make_config: ConfigMaker) -> None:
    config = make_config(**QUICK)
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("a file, where a folder should be")
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint could be written to .*checkpoints.*before the first step, so nothing is lost",
    ):
        penstock.train(config)
    assert lines(run_dir / "metrics.jsonl") == []
    assert "weights_published" not in names(run_dir)
    assert (run_dir / "checkpoints").read_text() == "a file, where a folder should be"


def test_a_model_that_transformers_cannot_save_is_found_at_the_start(make_config: ConfigMaker, tmp_path: Path) -> None:
    """It loads such a generation_config.json with a warning, and refuses to write it."""
    folder = save_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.5, "eos_token_id": 1})
    )
    config = make_config(**QUICK, **{"model.path": str(folder)})
    with pytest.raises(CheckpointError, match=r"no checkpoint could be written.*temperature"):
        penstock.train(config)
    assert lines(Path(config.run_dir) / "metrics.jsonl") == []
    assert not (Path(config.run_dir) / "checkpoints").exists()


def test_a_disk_that_garbles_what_is_written_is_found_at_the_start(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garble(folder: Path, on_progress: Callable[[], None]) -> None:
        path = folder / "controller/ledger.safetensors"
        path.write_bytes(bytes(path.stat().st_size))

    monkeypatch.setattr(checkpoint, "_flush", garble)
    with pytest.raises(CheckpointError, match=r"does not read back: controller/ledger\.safetensors: its content"):
        penstock.train(make_config(**QUICK))


def test_the_trial_changes_nothing_of_a_deterministic_run(make_config: ConfigMaker, tmp_path: Path) -> None:
    settings = DETERMINISTIC | {"data.train_path": write_prompts(tmp_path), "checkpoint.every_steps": None}
    found = []
    for at_end in (True, False):
        changes = {"run_dir": str(tmp_path / f"run_{at_end}"), "checkpoint": NEVER | {"at_end": at_end}}
        run_dir = penstock.train(make_config(**settings, **changes)).run_dir
        assert names(run_dir).count("checkpoint_proved") == at_end
        found.append(trained(run_dir))
    assert found[0] == found[1]
    assert len(found[0]) == 6


def test_too_little_room_for_the_first_checkpoint_is_said_and_no_error(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial itself fits; the optimizer's moments, which the first checkpoint has on top, do not."""
    probe = penstock.train(make_config(**QUICK)).run_dir
    size = next(event["bytes"] for event in events(probe) if event["event"] == "checkpoint_proved")
    monkeypatch.setattr(CheckpointStore, "free_bytes", lambda store: size + 1)
    other = {"run_dir": str(probe.with_name("other")), "observe.console": "plain"}
    assert penstock.train(make_config(**QUICK, **other)).stopped_by == "max_steps"
    assert "there may be no room for the first checkpoint: it needs about" in capsys.readouterr().out


async def test_an_interruption_is_heard_and_leaves_no_draft(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait(folder: Path) -> None:
        begun.set()
        assert go_on.wait(timeout=10)

    store = make_store(tmp_path)
    proving = asyncio.create_task(write_and_read_off_the_loop(store, snapshot(0, before=wait)))
    assert await asyncio.to_thread(begun.wait, 10)
    assert list(store.folder.glob(".writing*"))
    proving.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await proving
    assert not store.folder.exists()


async def test_a_disk_that_hangs_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    go_on = threading.Event()
    store = make_store(tmp_path, limit_seconds=0.1)
    stuck = snapshot(0, before=lambda folder: assert_true(go_on.wait(timeout=30)))
    with pytest.raises(
        CheckpointError,
        match=r"no test checkpoint was written to .*within 0\.1 s \(runtime\.timeouts\.checkpoint_seconds\)",
    ):
        await asyncio.wait_for(write_and_read_off_the_loop(store, stuck), timeout=10)
    go_on.set()


def test_a_failed_trial_is_said_without_a_traceback(make_config: ConfigMaker, tmp_path: Path) -> None:
    from penstock.config.reading.loading import dump_config

    config = make_config(**QUICK)
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "checkpoints").write_text("")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml")])
    assert shown.exit_code == 1
    assert "no checkpoint could be written" in shown.stderr
    assert "Traceback" not in shown.stderr

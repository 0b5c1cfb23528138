"""A resume that is refused, for whatever reason and however late, leaves the run as it was."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import penstock
from penstock.errors import CheckpointError, PenstockError
from penstock.observe.loggers.base import Logger
from penstock.training.backends.local.checkpointing import LocalSnapshot
from penstock.training.workers.local import LocalTrainer
from tests.run.conftest import config_maker
from tests.run.test_train import lines
from tests.support.folders import contents
from tests.support.loggers import Remembering, failing_at

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run that has recorded a step more than its last checkpoint has; to be copied, not changed."""
    changes = {"checkpoint.every_steps": 2, "checkpoint.at_end": False, "eval.at_end": False, "rollout.record": True}
    return penstock.train(config_maker(model_folder, tmp_path_factory.mktemp("killed"))(**changes)).run_dir


@pytest.fixture
def run_dir(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def nothing(checkpoint: Path) -> None:
    """The checkpoint is sound."""


def damage_state(checkpoint: Path) -> None:
    (checkpoint / "controller/state.json").write_text("{}")


def damage_ledger(checkpoint: Path) -> None:
    (checkpoint / "controller/ledger.safetensors").write_bytes(b"\0" * 64)


def shorten_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"short")


def damage_optimizer(checkpoint: Path) -> None:
    for path in (checkpoint / "trainer").iterdir():
        path.write_bytes(b"short")


def untie(checkpoint: Path) -> None:
    (checkpoint / "records.json").write_text("{}")


@pytest.mark.parametrize(
    ("overrides", "damage", "loggers"),
    [
        (["data.train_size=23"], nothing, []),
        ([], damage_optimizer, []),
        ([], nothing, [Remembering("broken", failing_at("start"))]),
        *(
            pytest.param([override], nothing, [], marks=pytest.mark.long)
            for override in (
                "seed=5",
                "training.prompt_groups_per_step=2",
                "rollout.environment.kind=nothing",
                "runtime.device=cuda:99",
                "rollout.group_size=4",
                "model.path=nowhere",
            )
        ),
        *(
            pytest.param([], damage, [], marks=pytest.mark.long)
            for damage in (damage_state, damage_ledger, shorten_weights, untie)
        ),
    ],
)
def test_every_file_stays_as_it_was(
    run_dir: Path, overrides: Sequence[str], damage: Damage, loggers: Sequence[Logger]
) -> None:
    [checkpoint] = (run_dir / "checkpoints").iterdir()
    sound = contents(checkpoint)
    damage(checkpoint)
    before = contents(run_dir)
    with pytest.raises(PenstockError):
        penstock.resume(run_dir, [*overrides, "training.max_steps=4"], loggers)
    assert contents(run_dir) == before
    for name, content in sound.items():
        if content is not None:
            (checkpoint / name).write_bytes(content)
    assert penstock.resume(run_dir, ["training.max_steps=4"]).summary["steps"] == 4


def test_a_trial_write_that_fails_leaves_every_file_as_it_was(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LocalSnapshot.write

    def refused(snapshot: LocalSnapshot, folder: Path) -> None:
        if "proof" in folder.name:
            raise OSError(28, "No space left on device")
        write(snapshot, folder)

    before = contents(run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(LocalSnapshot, "write", refused)
        with pytest.raises(CheckpointError, match="No space left"):
            penstock.resume(run_dir, ["training.max_steps=4"])
    assert contents(run_dir) == before
    assert penstock.resume(run_dir, ["training.max_steps=4"]).summary["steps"] == 4


def test_a_signal_before_the_run_goes_on_leaves_it_as_it_was(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(trainer: LocalTrainer, folder: Path) -> None:
        raise asyncio.CancelledError

    before = contents(run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(LocalTrainer, "load_checkpoint", interrupted)
        result = penstock.resume(run_dir, ["training.max_steps=4"])
    assert (result.stopped_by, result.summary["steps"]) == ("interrupted", 3)
    assert contents(run_dir) == before


def test_what_was_said_before_the_run_was_accepted_is_not_lost(run_dir: Path) -> None:
    earlier = len(lines(run_dir / "events.jsonl"))
    penstock.resume(run_dir, ["training.max_steps=4"])
    events = [line["event"] for line in lines(run_dir / "events.jsonl")[earlier:]]
    assert events[:2] == ["run_started", "run_resumed"]
    spans = {event["name"] for event in json.loads((run_dir / "trace.json").read_text())}
    assert {"setting up the engine", "loading the checkpoint", "training"} <= spans
    assert (run_dir / "trace.1.json").exists()

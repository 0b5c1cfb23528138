"""Checkpoints on disk: complete or not there, the right ones kept, and errors that leave the good ones alone."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.config.models import CheckpointConfig
from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, ControllerState, SavedController
from penstock.errors import CheckpointError, SetupError, WorkerLost
from penstock.run.checkpoint import CheckpointOwner, CheckpointStore, Snapshot
from penstock.run.checkpoint_check import damage
from penstock.run.checkpoint_folders import checkpoints, newest_checkpoint, remove_drafts
from penstock.run.seal import SEAL, Seal

STATE = ControllerState(
    stream="x",
    redispatches={},
    ready={},
    groups=0,
    committed=0,
    dropped=0,
    bound_drops=[],
    free_drops=0,
    events={},
    tokens_generated=0,
    elapsed_seconds=0.0,
    buffer={},
)


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@dataclass
class FakeTrainer:
    """Writes one file, after whatever the test wants to happen."""

    before: Callable[[Path], None] = lambda folder: None
    bytes_to_come: int = 0

    def write(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text("weights")
        self.before(folder)


def make_store(
    folder: Path,
    saved: list[int] | None = None,
    resumed_step: int | None = None,
    limit_seconds: float = 60.0,
    **settings: Any,
) -> CheckpointStore:
    found = saved if saved is not None else []
    return CheckpointStore(
        folder / "run" / "checkpoints",
        CheckpointConfig(**settings),
        NoTokenizer(),
        lambda step, *_: found.append(step),
        CheckpointOwner("this-run", "seed: 0\n", resumed_step),
        limit_seconds=limit_seconds,
    )


def snapshot(step: int, value: float | None = None, before: Callable[[Path], None] = lambda folder: None) -> Snapshot:
    return Snapshot(step, FakeTrainer(before), ControllerSnapshot(STATE, b"\1\0", None), value)


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder / "run" / "checkpoints")]


async def test_the_latest_are_kept(tmp_path: Path) -> None:
    saved: list[int] = []
    store = make_store(tmp_path, saved, keep_latest=2)
    for step in (1, 2, 10):
        await store.begin(snapshot(step))
    await store.finish()
    assert names(tmp_path) == ["step_2", "step_10"]
    assert saved == [1, 2, 10]
    assert SavedController.read(tmp_path / "run/checkpoints/step_10/controller").ends == b"\1\0"


@pytest.mark.parametrize(
    ("best_mode", "kept"), [("max", ["step_2", "step_4", "step_5"]), ("min", ["step_1", "step_5"])]
)
async def test_the_best_are_kept_besides_the_latest(tmp_path: Path, best_mode: str, kept: list[str]) -> None:
    keep_best = len(kept) - 1
    store = make_store(
        tmp_path, keep_latest=1, keep_best=keep_best, best_metric="eval/reward_mean", best_mode=best_mode
    )
    for step, value in enumerate([0.1, 0.9, 0.3, 0.8, None], start=1):
        await store.begin(snapshot(step, value))
    await store.finish()
    assert names(tmp_path) == kept


async def test_of_equally_good_ones_the_newest_is_the_best(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_latest=1, keep_best=1)
    for step, value in enumerate([0.9, 0.9, None], start=1):
        await store.begin(snapshot(step, value))
    await store.finish()
    assert names(tmp_path) == ["step_2", "step_3"]


async def test_a_value_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_latest=1, keep_best=1)
    for step, value in enumerate([0.5, float("nan"), None], start=1):
        await store.begin(snapshot(step, value))
    await store.finish()
    assert names(tmp_path) == ["step_1", "step_3"]


async def test_a_write_that_never_ends_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    go_on = threading.Event()
    store = make_store(tmp_path, limit_seconds=0.1)
    await store.begin(snapshot(1, before=lambda folder: assert_true(go_on.wait(timeout=30))))
    await asyncio.sleep(0)
    assert store.activity().startswith("writing step 1 for 0.")
    with pytest.raises(CheckpointError, match=r"within 0\.1 s \(runtime\.timeouts\.checkpoint_seconds\)"):
        await store.finish()
    assert store.activity() == "idle"
    go_on.set()


async def test_time_in_which_the_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    go_on = threading.Event()
    store = make_store(tmp_path, limit_seconds=1.0)
    await store.begin(snapshot(1, before=lambda folder: assert_true(go_on.wait(timeout=30))))
    await asyncio.sleep(0.05)
    time.sleep(1.2)  # noqa: ASYNC251 - nothing happens in the loop, as if the process was stopped
    await asyncio.sleep(0.05)
    go_on.set()
    await store.finish()
    assert names(tmp_path) == ["step_1"]


async def test_a_finish_that_is_cancelled_lets_no_second_write_begin(tmp_path: Path) -> None:
    go_on, writes = threading.Event(), []

    def wait(folder: Path) -> None:
        writes.append(folder.name)
        assert_true(go_on.wait(timeout=10))

    store = make_store(tmp_path)
    await store.begin(snapshot(1, before=wait))
    finishing = asyncio.create_task(store.finish())
    await asyncio.sleep(0)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    second = asyncio.create_task(store.begin(snapshot(2, before=wait)))
    await asyncio.sleep(0.05)
    assert (second.done(), writes) == (False, [".writing_step_1"])
    go_on.set()
    await second
    await store.finish()
    assert names(tmp_path) == ["step_1", "step_2"]


async def test_reading_back_for_the_seal_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.run.file_digests.BLOCK_BYTES", 10)
    monkeypatch.setattr("penstock.run.checkpoint._flush", lambda folder, on_progress: None)
    store = make_store(tmp_path)
    await store.begin(snapshot(1, before=lambda folder: assert_true((folder / "large").write_bytes(bytes(1000)) > 0)))
    await store.finish()
    assert store.progress > 100


async def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    go_on = threading.Event()
    store = make_store(tmp_path)
    await store.begin(snapshot(1, before=lambda folder: assert_true(go_on.wait(timeout=10))))
    assert names(tmp_path) == []
    second = asyncio.create_task(store.begin(snapshot(2)))
    await asyncio.sleep(0.05)
    assert not second.done(), "memory holds one snapshot at a time"
    go_on.set()
    await second
    await store.finish()
    assert names(tmp_path) == ["step_1", "step_2"]


def assert_true(value: bool) -> None:
    assert value


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
async def test_a_disk_that_refuses_leaves_the_checkpoints_before(tmp_path: Path, number: int) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(number, "the disk refuses")

    store = make_store(tmp_path, keep_latest=1)
    await store.begin(snapshot(1))
    await store.begin(snapshot(2, before=refuse))
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved to .*the disk refuses.*penstock resume"):
        await store.finish()
    assert names(tmp_path) == ["step_1"]
    assert list((tmp_path / "run/checkpoints").glob(".*")) == []


async def test_a_row_worker_that_is_lost_again_and_again_is_named_with_step_and_folder(tmp_path: Path) -> None:
    def lose(folder: Path) -> None:
        raise WorkerLost("data plane worker: its process 7 was ended by SIGKILL")

    store = make_store(tmp_path, keep_latest=1)
    await store.begin(snapshot(1))
    await store.begin(snapshot(2, before=lose))
    said = rf"step 2 could not be saved to .*SIGKILL.*untouched; resume with: penstock resume {tmp_path / 'run'}$"
    with pytest.raises(CheckpointError, match=said):
        await store.finish()
    assert names(tmp_path) == ["step_1"]


async def test_an_old_one_that_cannot_be_renamed_stays_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name == "step_1":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    store = make_store(tmp_path, keep_latest=1)
    for step in (1, 2, 3):
        await store.begin(snapshot(step))
    await store.finish()
    assert names(tmp_path) == ["step_1", "step_3"]
    assert "step_1 cannot be removed: Device or resource busy" in caplog.text


async def test_an_old_one_that_was_half_removed_does_not_block_its_name(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_latest=1)
    (store.folder / ".removing_step_1/stuck").mkdir(parents=True)
    for step in (1, 2):
        await store.begin(snapshot(step))
    await store.finish()
    assert names(tmp_path) == ["step_2"]


async def test_a_write_that_failed_is_told_without_waiting(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    store = make_store(tmp_path)
    store.raise_failed()
    await store.begin(snapshot(1, before=refuse))
    await store.close()
    with pytest.raises(CheckpointError, match="full"):
        store.raise_failed()


async def test_a_folder_that_is_not_sealed_is_never_chosen(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.begin(snapshot(1))
    await store.finish()
    folder = tmp_path / "run/checkpoints"
    for name in ("step_2", ".writing_step_3", ".removing_step_1"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("half")
    assert newest_checkpoint(folder).name == "step_1"
    remove_drafts(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]


async def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    saved: list[int] = []
    store = make_store(tmp_path, saved)
    for _ in range(2):
        await store.begin(snapshot(4))
        await store.finish()
    assert saved == [4]


async def test_what_has_a_checkpoints_name_does_not_block_the_write(tmp_path: Path) -> None:
    """Neither a half-deleted folder, nor a whole checkpoint that this run did not write, nor a dangling link."""
    folder = tmp_path / "run/checkpoints"
    other = make_store(tmp_path / "other")
    await other.begin(snapshot(2))
    await other.finish()
    folder.mkdir(parents=True)
    (folder / "step_1").mkdir()
    (folder / "step_1/model.safetensors").write_text("half")
    shutil.copytree(tmp_path / "other/run/checkpoints/step_2", folder / "step_2")
    (folder / "step_3").symlink_to("nowhere")
    store = make_store(tmp_path, keep_latest=9)
    for step in (1, 2, 3):
        assert not store.has(step)
        await store.begin(snapshot(step))
        await store.finish()
        assert store.has(step)
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]
    assert (folder / "aside_step_1/model.safetensors").read_text() == "half"
    assert (folder / "aside_step_2" / SEAL).is_file()


async def test_the_checkpoint_a_run_goes_on_from_is_there(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.begin(snapshot(4))
    await store.finish()
    resumed = make_store(tmp_path, resumed_step=4)
    assert resumed.has(4)
    assert not make_store(tmp_path).has(4)


async def test_a_checkpoint_has_the_settings_of_its_run(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.begin(snapshot(1))
    await store.finish()
    assert (store.folder / "step_1/controller/config.yaml").read_text() == "seed: 0\n"
    assert not damage(store.folder / "step_1", "this-run", 1)
    store.note_value(1, 0.5)
    assert Seal.read(store.folder / "step_1").value == 0.5
    assert not damage(store.folder / "step_1", "this-run", 1)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"there is no checkpoint in .*nowhere"):
        newest_checkpoint(tmp_path / "nowhere")


def test_a_damaged_controller_state_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "step_1" / "controller"
    folder.mkdir(parents=True)
    ControllerSnapshot(STATE, b"", None).write(folder)
    assert SavedController.read(folder).ends == b""
    (folder / "state.json").write_text("{}")
    with pytest.raises(SetupError, match="step_1"):
        SavedController.read(folder)

"""While a checkpoint is written: a slow disk is no stall, a stuck one is, and what it refers to is on disk first."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import RecordError
from penstock.run import flushing, write_progress
from penstock.run.directory import RunDirectory
from penstock.run.flushing import flush_file, flush_folder
from penstock.run.write_progress import WriteProgress
from penstock.training.backends.local.checkpointing import LocalSnapshot
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines

STALL_SECONDS = 2.0
QUICK: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}, "checkpoint.every_steps": 1}


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_progress, "LOOK_SECONDS", 0.02)


def config_with_stalls(make_config: ConfigMaker) -> Any:
    """One that ends where nothing happens for a moment; rollouts cannot go on for long during the writing."""
    return make_config(
        **QUICK,
        **{
            "training.max_steps": 2,
            "staleness": {"policy": "on_policy"},
            "rollout.environment.in_process": True,  # no process to start, which may take longer than a stall
            "rollout.failure": {"stall_seconds": STALL_SECONDS, "on_stall": "stop"},
        },
    )


def first_write_begins_with(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]) -> None:
    """Have something happen in the writing thread before the first checkpoint's weights are written."""
    write, begun = LocalSnapshot.write, []

    def written(snapshot: LocalSnapshot, folder: Path) -> None:
        if not begun and "proof" not in folder.name:
            begun.append(folder)
            act(folder)
        write(snapshot, folder)

    monkeypatch.setattr(LocalSnapshot, "write", written)


@pytest.mark.long
def test_a_slow_write_is_no_stall(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(folder: Path) -> None:
        with (folder / "growing").open("wb", buffering=0) as file:
            end = time.monotonic() + 2.5 * STALL_SECONDS
            while time.monotonic() < end:
                file.write(b"x")
                time.sleep(0.01)

    first_write_begins_with(monkeypatch, slowly)
    run_dir = penstock.train(config_with_stalls(make_config)).run_dir
    assert "stalled" not in [line["event"] for line in lines(run_dir / "events.jsonl")]
    assert (run_dir / "checkpoints/step_2").is_dir()


def test_a_stuck_disk_is_a_stall(make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(folder: Path) -> None:
        deadline = time.monotonic() + 60
        while "stalled" not in (tmp_path / "run" / "events.jsonl").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)

    first_write_begins_with(monkeypatch, stuck)
    with pytest.raises(penstock.errors.RunStalled, match="end-of-step work"):
        penstock.train(config_with_stalls(make_config))


def test_progress_grows_with_the_files_and_stands_still_with_them(tmp_path: Path) -> None:
    progress = WriteProgress()
    with progress.watching(tmp_path):
        for name in ("a", "a", "b"):
            before = progress.count
            with (tmp_path / name).open("ab") as file:
                file.write(b"x")
            deadline = time.monotonic() + 10
            while progress.count == before:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        stands = progress.count
        time.sleep(0.2)
        assert progress.count == stands
    assert progress.count == stands + 1


def test_a_large_file_is_flushed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "_PIECE_BYTES", 2**16)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2**16 * 3 + 5))
    content, calls = path.read_bytes(), []
    flush_file(path, lambda: calls.append(1))
    assert len(calls) == 5
    assert path.read_bytes() == content


def test_a_file_system_without_memory_maps_flushes_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, size: int) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(flushing, "_PIECE_BYTES", 2**16)
    monkeypatch.setattr(flushing.mmap, "mmap", refused)
    (tmp_path / "large").write_bytes(bytes(2**17))
    calls: list[int] = []
    flush_file(tmp_path / "large", lambda: calls.append(1))
    assert calls == [1]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_mount_that_flushes_no_folders_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match="Input/output") if number == errno.EIO else nullcontext():
        flush_folder(tmp_path)


def test_the_settings_are_on_disk_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    directory = RunDirectory(tmp_path / "run")
    flushed.clear()
    directory.write_config("seed: 1\n")
    directory.close()
    assert flushed == [".config.yaml.writing", "run"]


def test_what_a_checkpoint_refers_to_is_on_disk_before_it_appears(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, bool]] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def note(name: str) -> None:
        happened.append((name, threading.current_thread() is threading.main_thread()))

    def noted_fsync(descriptor: int) -> None:
        note(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        note(f"{Path(target).name} appears")
        return rename(path, target)

    def noted_replace(path: Path, target: Path) -> Path:
        note(f"{Path(target).name} appears")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    monkeypatch.setattr(Path, "replace", noted_replace)
    penstock.train(make_config(**QUICK, **{"training.max_steps": 1}))
    names = [name for name, _ in happened]
    renamed = names.index("step_1 appears")
    begun = names.index("penstock.json appears") + 1  # that of the trial before the first step
    before = names[begun : names.index("penstock.json appears", begun)]
    files = {"metrics.jsonl", "ledger.jsonl", "samples.jsonl", "events.jsonl"}
    assert files <= set(before)
    assert not any(on_loop for name, on_loop in happened if name in files)
    assert "records.json" in names[:renamed]
    assert begun + before.index("metrics.jsonl") < renamed
    word = len(names) - 1 - names[::-1].index("run.json appears")
    assert "checkpoints" in names[begun + len(before) : word], "the draft has its name on disk before the word of it"


def test_a_file_that_cannot_be_brought_to_disk_leaves_no_checkpoint(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refused(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(RecordError, match=r"metrics\.jsonl' cannot be written: Input/output error"):
        penstock.train(make_config(**QUICK))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []

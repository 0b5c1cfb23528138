"""A checkpoint's rows: written by their keeper, and let go as soon as nobody needs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, SavedController
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.archive import load_rows
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import CheckpointError, NonFiniteError, RunDirectoryLost
from penstock.run.between_steps import BetweenSteps
from penstock.run.checkpoint import Snapshot
from tests.data_plane.support import FIELDS, SCHEMA, columns, meta_of
from tests.run.test_checkpoint_store import STATE, make_store, snapshot
from tests.support.scripted_run import scripted_config


@pytest.fixture
def keeper() -> RowKeeper:
    plane = MemoryDataPlane()
    plane.register_partition("p", SCHEMA)
    plane.put_samples(["a_g0", "a_g1"], columns([2, 3]), "p")
    return RowKeeper(plane)


async def with_rows(keeper: RowKeeper, plain: Snapshot) -> Snapshot:
    state = STATE.model_copy(update={"ready": {"a": 0}})
    held = await keeper.hold(meta_of("p", "a_g0", "a_g1"), FIELDS)
    return replace(plain, controller=ControllerSnapshot(state, b"\0", held))


async def test_they_are_written_and_let_go(keeper: RowKeeper, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.begin(await with_rows(keeper, snapshot(1)))
    await store.finish()
    saved = SavedController.read(tmp_path / "run/checkpoints/step_1/controller")
    assert saved.rows is not None
    assert load_rows(saved.rows).sample_ids == ("a_g0", "a_g1")
    assert keeper.holds == 0


async def test_they_are_let_go_where_the_write_fails(keeper: RowKeeper, tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    store = make_store(tmp_path)
    await store.begin(await with_rows(keeper, snapshot(1, before=full)))
    with pytest.raises(CheckpointError):
        await store.finish()
    assert keeper.holds == 0


async def test_they_are_let_go_where_the_step_was_saved_before(keeper: RowKeeper, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    await store.begin(snapshot(1))
    await store.begin(await with_rows(keeper, snapshot(1)))
    await store.finish()
    assert keeper.holds == 0


async def test_a_trial_reads_them_back_and_lets_them_go(keeper: RowKeeper, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    found: list[int] = []
    store.written_for_proof(
        await with_rows(keeper, snapshot(0)),
        lambda folder, run_id: found.append(len(load_rows(folder / "controller" / "rows"))),
    )
    assert found == [2]
    assert keeper.holds == 0


async def test_they_are_let_go_where_the_write_before_failed(keeper: RowKeeper, tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    store = make_store(tmp_path)
    await store.begin(snapshot(1, before=full))
    with pytest.raises(CheckpointError):
        await store.begin(await with_rows(keeper, snapshot(2)))
    assert keeper.holds == 0


async def test_they_are_let_go_where_no_folder_can_be_made(keeper: RowKeeper, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.folder.parent.mkdir(parents=True, exist_ok=True)
    store.folder.write_text("a file")
    await store.begin(await with_rows(keeper, snapshot(1)))
    with pytest.raises(CheckpointError):
        await store.finish()
    with pytest.raises(OSError, match="checkpoints"):
        store.written_for_proof(await with_rows(keeper, snapshot(1)), lambda folder, run_id: None)
    assert keeper.holds == 0


async def test_they_are_let_go_where_the_run_directory_is_lost(
    keeper: RowKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RunDirectoryLost("gone")

    store = make_store(tmp_path)
    monkeypatch.setattr(store, "_require_directory", lost)
    await store.begin(await with_rows(keeper, snapshot(1)))
    with pytest.raises(RunDirectoryLost):
        await store.finish()
    with pytest.raises(RunDirectoryLost):
        store.written_for_proof(await with_rows(keeper, snapshot(1)), lambda folder, run_id: None)
    assert keeper.holds == 0


async def test_they_are_let_go_where_the_trainer_cannot_be_copied(keeper: RowKeeper, tmp_path: Path) -> None:
    class Failing:
        async def snapshot(self) -> object:
            raise NonFiniteError("no memory")

    class Ready:
        async def snapshot(self) -> ControllerSnapshot:
            return (await with_rows(keeper, snapshot(1))).controller

    config, records = scripted_config(), MagicMock()
    between = BetweenSteps(config, cast("Any", Failing()), make_store(tmp_path), MagicMock(), records)
    between.controller = cast("Any", Ready())
    with pytest.raises(NonFiniteError):
        await between.snapshot(1)
    assert keeper.holds == 0

"""A checkpoint's rows: written by their keeper, and let go as soon as nobody needs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, SavedController
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.archive import load_rows
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import CheckpointError
from penstock.run.checkpoint import Snapshot
from tests.data_plane.support import FIELDS, SCHEMA, columns, meta_of
from tests.run.test_checkpoint_store import STATE, make_store, snapshot


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

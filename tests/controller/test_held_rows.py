"""Rows of ready groups in a snapshot: held as they are at that moment, never read by the controller, let go in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, SavedController
from penstock.controller.parts import READABLE
from penstock.data_plane import fields
from penstock.data_plane.archive import load_rows
from penstock.data_plane.field_spec import FieldKind
from penstock.data_plane.narrow import NarrowClient
from penstock.data_plane.row_keeper import RowKeeper
from penstock.rollout.manager import PARTITION
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config

CONFIG = {"staleness": {"policy": "windowed", "max_staleness": 1}, "training": {"prompt_groups_per_step": 2}}
PER_SAMPLE = 4 + 8 + 1 + 4
"""Bytes of reward, length, whether it was truncated, and mask."""


def client(run: ScriptedRun) -> NarrowClient:
    found = run.controller._parts.data_plane
    assert isinstance(found, NarrowClient)
    return found


def keeper(run: ScriptedRun) -> RowKeeper:
    assert run.controller._parts.rows is not None
    return run.controller._parts.rows


async def snapshot_after_first_step(run: ScriptedRun) -> tuple[ControllerSnapshot, list[str]]:
    """A whole run; the snapshot taken after its first step, and the rows that were ready then."""
    taken: list[tuple[ControllerSnapshot, list[str]]] = []

    async def after_step(steps: int) -> None:
        if steps == 1:
            await run.buffer.wait_selectable(2)
            before = dict(client(run).bytes_read)
            snapshot = await run.controller.snapshot()
            assert client(run).bytes_read == before, "the controller read rows for a snapshot"
            ids = [f"{group}_g{index}" for group in snapshot.state.ready for index in range(2)]
            taken.append((snapshot, ids))

    run.after_step = after_step
    await run.run()
    return taken[0]


async def test_rows_that_later_steps_cleared_are_still_written(tmp_path: Path) -> None:
    run = ScriptedRun(scripted_config(**CONFIG), prompts=12)
    snapshot, ready = await snapshot_after_first_step(run)
    assert len(ready) >= 4
    assert run.rows_left == 0, "the rows were cleared before they are written"
    snapshot.write(tmp_path)
    rows = load_rows(tmp_path / "rows")
    assert sorted(rows.sample_ids) == sorted(ready)
    assert rows.columns.keys() == set(fields.ROLLOUT_FIELDS), "as they were: without what a later step adds"
    assert keeper(run).holds == 1
    snapshot.release()
    assert keeper(run).holds == 0


async def test_a_restored_controller_has_the_rows_and_has_not_read_them(tmp_path: Path) -> None:
    snapshot, ready = await snapshot_after_first_step(ScriptedRun(scripted_config(**CONFIG), prompts=12))
    snapshot.write(tmp_path)
    again = ScriptedRun(scripted_config(**CONFIG), prompts=12, trainer=ScriptedTrainer(version=1))
    again._build()
    await again.controller.restore(SavedController.read(tmp_path))
    assert again.data_plane.count_samples(PARTITION) == len(ready)
    assert not client(again).bytes_read
    assert await again.controller.run() == "data_exhausted"
    trained = {f"{group}_g{index}" for group in again.trained_groups for index in range(2)}
    assert set(ready) <= trained
    assert again.rows_left == 0


async def test_deterministic_runs_hold_no_rows() -> None:
    config = scripted_config(
        deterministic=True, staleness={"policy": "in_order", "lookahead": 0}, weight_sync={"mode": "drain"}
    )
    run = ScriptedRun(config, prompts=8)
    await run.run()
    assert (await run.controller.snapshot()).rows is None
    assert keeper(run).holds == 0


async def test_a_step_costs_the_controller_one_number_per_sample_and_field() -> None:
    run = ScriptedRun(scripted_config(**CONFIG), prompts=12)
    read: list[int] = []
    run.after_step = lambda steps: read.append(client(run).bytes_read.total())
    await run.run()
    assert client(run).bytes_read.keys() == {
        fields.REWARD,
        fields.RESPONSE_LENGTH,
        fields.TRUNCATED,
        fields.SAMPLE_MASK,
    }
    groups_per_step, group_size = 2, 2
    assert read == [PER_SAMPLE * groups_per_step * group_size * steps for steps in range(1, 7)]


@pytest.mark.parametrize("name", sorted(READABLE))
def test_what_the_controller_may_read_is_never_per_token_or_text(name: str) -> None:
    assert fields.SPECS[name].kind is FieldKind.FIXED

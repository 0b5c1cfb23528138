"""Rows that are held as they are, written later, and put back: by metadata, numbers and folders."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from penstock.data_plane import archive
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.field_spec import fixed
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_files import RowsSummary
from penstock.data_plane.row_keeper import RowKeeper
from penstock.data_plane.store.messages import WhenFull
from penstock.errors import DataPlaneError, MissingRowError
from tests.data_plane.support import FIELDS, SCHEMA, columns

GROUPS = {"a": [3, 1], "b": [2, 0], "c": [5, 4]}


def put_groups(plane: DataPlaneClient, partition: str) -> KVBatchMeta:
    plane.register_partition(partition, SCHEMA)
    metas = []
    for offset, (group, lengths) in enumerate(GROUPS.items()):
        samples = tuple(f"{group}_g{index}" for index in range(len(lengths)))
        plane.put_samples(samples, columns(lengths, 100 * offset), partition)
        metas.append(KVBatchMeta(partition, samples, frozenset(FIELDS), tuple(lengths)))
    return KVBatchMeta.concat(metas)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_what_is_written_is_what_was_there_when_it_was_held(
    plane: DataPlaneClient, partition: str, tmp_path: Path
) -> None:
    meta = put_groups(plane, partition)
    expected, found = tmp_path / "expected", tmp_path / "found"
    for folder in (expected, found):
        folder.mkdir()
    archive.save_rows(expected, plane.get_samples(meta, sorted(FIELDS)))
    held = await RowKeeper(plane).hold(meta, sorted(FIELDS))
    plane.put_samples(meta.sample_ids[:2], {"reward": torch.tensor([-1.0, -2.0])}, partition)
    plane.clear_samples(meta.sample_ids[2:], partition)
    held.save(found)
    assert content(found) == content(expected)
    assert held.rows == 6


async def test_rows_come_back_as_they_were(plane: DataPlaneClient, partition: str, tmp_path: Path) -> None:
    meta, keeper = put_groups(plane, partition), RowKeeper(plane)
    before = plane.get_samples(meta, FIELDS)
    held = await keeper.hold(meta, FIELDS)
    held.save(tmp_path)
    held.release()
    plane.clear_samples(meta.sample_ids, partition)
    assert await keeper.load(tmp_path, partition) == keeper.inspect(tmp_path) == RowsSummary(6, frozenset(FIELDS))
    after = plane.get_samples(meta, FIELDS)
    assert after.objects("text") == before.objects("text")
    assert torch.equal(after.tensor("reward"), before.tensor("reward"))
    assert torch.equal(after.jagged("tokens").values, before.jagged("tokens").values)
    assert torch.equal(after.jagged("tokens").offsets_R1, before.jagged("tokens").offsets_R1)


async def test_rows_that_are_gone_cannot_be_held(plane: DataPlaneClient, partition: str) -> None:
    meta, keeper = put_groups(plane, partition), RowKeeper(plane)
    plane.clear_samples(["b_g1"], partition)
    with pytest.raises(MissingRowError, match="b_g1"):
        await keeper.hold(meta, FIELDS)
    assert keeper.holds == 0


async def test_rows_are_let_go_once_and_then_cannot_be_saved(
    plane: DataPlaneClient, partition: str, tmp_path: Path
) -> None:
    keeper = RowKeeper(plane)
    held = await keeper.hold(put_groups(plane, partition), FIELDS)
    assert keeper.holds == 1
    held.release()
    held.release()
    assert keeper.holds == 0
    with pytest.raises(DataPlaneError, match="not held any more"):
        held.save(tmp_path)


async def test_holding_rows_copies_nothing_and_letting_go_frees_them() -> None:
    plane = MemoryDataPlane()
    plane.register_partition("p", SCHEMA)
    given = columns([3, 1])
    plane.put_samples(["a_g0", "a_g1"], given, "p")
    values = weakref.ref(given["tokens"].values)
    keeper = RowKeeper(plane)
    held = await keeper.hold(KVBatchMeta("p", ("a_g0", "a_g1"), frozenset(FIELDS), (3, 1)), FIELDS)
    plane.clear_samples(["a_g0", "a_g1"], "p")
    del given
    gc.collect()
    assert values() is not None, "cleared rows are gone although they are held: they must have been copied"
    held.release()
    gc.collect()
    assert values() is None


async def test_a_damaged_archive_is_named_and_puts_nothing(
    plane: DataPlaneClient, partition: str, tmp_path: Path
) -> None:
    meta, keeper = put_groups(plane, partition), RowKeeper(plane)
    (await keeper.hold(meta, FIELDS)).save(tmp_path)
    plane.clear_samples(meta.sample_ids, partition)
    rows = tmp_path / "rows.safetensors"
    rows.write_bytes(rows.read_bytes()[:-9])
    with pytest.raises(DataPlaneError, match=str(tmp_path)):
        await keeper.load(tmp_path, partition)
    with pytest.raises(DataPlaneError, match=str(tmp_path)):
        keeper.inspect(tmp_path)
    assert plane.count_samples(partition) == 0


class _Gated(MemoryDataPlane):
    """Links wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may = threading.Event(), threading.Event()

    def link_samples(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        self.begun.set()
        self.may.wait(60)
        super().link_samples(meta, select_fields, partition_id)


async def test_a_hold_that_is_cancelled_holds_nothing() -> None:
    plane = _Gated()
    keeper = RowKeeper(plane)
    holding = asyncio.create_task(keeper.hold(put_groups(plane, "p"), FIELDS))
    await asyncio.to_thread(plane.begun.wait, 60)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    released = asyncio.Event()
    keeper.release = lambda number: (RowKeeper.release(keeper, number), released.set())  # type: ignore[method-assign, assign]
    plane.may.set()
    await asyncio.wait_for(released.wait(), 60)
    assert keeper.holds == 0


async def test_restored_groups_free_their_memory_one_by_one(tmp_path: Path) -> None:
    groups = [tuple(f"{group}_g{index}" for index in range(2)) for group in "abc"]
    samples = tuple(itertools.chain(*groups))
    plane = ShmOwner(6_000_000, WhenFull.REFUSE)
    try:
        plane.register_partition("p", [fixed("big", "uint8")])
        for group in groups:
            plane.put_samples(group, {"big": torch.ones(2, 1_000_000, dtype=torch.uint8)}, "p")
        meta = KVBatchMeta("p", samples, frozenset({"big"}), (0,) * 6)
        keeper = RowKeeper(plane)
        held = await keeper.hold(meta, ["big"])
        held.save(tmp_path)
        held.release()
        full = plane.store.used
        plane.clear_samples(samples, "p")
        await keeper.load(tmp_path, "p")
        assert plane.store.used == full
        plane.clear_samples(groups[1], "p")
        assert plane.store.used == full * 2 // 3
    finally:
        plane.close()

"""The worker that reads and writes rows for the controller, in a process of its own, with real kills."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.models import DataPlaneConfig
from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.data_plane import archive, fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.columns import JaggedColumn, ObjectColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.opening import open_data_plane
from penstock.data_plane.row_files import RowsSummary
from penstock.data_plane.row_keeper import RowKeeper
from penstock.errors import DataPlaneError, MissingRowError
from penstock.rollout.row_worker import begin_row_worker
from penstock.rollout.sample_texts import SampleText, WorkerTexts
from penstock.runtime.workers.process import ProcessWorker
from penstock.runtime.workers.repeated import RepeatedCalls
from tests.support.processes import alive, stop

NAMES = (fields.INPUT_IDS, fields.TOKEN_MASK, fields.REWARD, fields.RESPONSE_TEXT)
LONG = 60.0


def put_groups(plane: DataPlaneOwner) -> KVBatchMeta:
    plane.register_partition("p", fields.schema(*NAMES))
    ids: list[str] = []
    for group, word in enumerate(("one", "two", "three")):
        rows = [torch.arange(3 + group) + 10 * group, torch.arange(4) + 10 * group]
        samples = [f"g{group}_g{index}" for index in range(2)]
        masks = [torch.tensor([0.0, 0.0] + [1.0] * (len(row) - 2)) for row in rows]
        columns: dict[str, Any] = {
            fields.INPUT_IDS: JaggedColumn.from_rows(rows),
            fields.TOKEN_MASK: JaggedColumn.from_rows(masks),
            fields.REWARD: torch.tensor([1.0, 0.5]) + group,
            fields.RESPONSE_TEXT: ObjectColumn((word, f"{word} again")),
        }
        plane.put_samples(samples, columns, "p")
        ids += samples
    return KVBatchMeta("p", tuple(ids), frozenset(NAMES), (0,) * len(ids))


class Rows:
    """Rows in a data plane, and a worker for them."""

    def __init__(self, adapter: str, silence_seconds: float = LONG, *, at_once: bool = True) -> None:
        shm = DataPlaneConfig(adapter="shm", capacity_gb=0.01, observe=False)
        config = shm if adapter == "shm" else DataPlaneConfig()
        self.plane = open_data_plane(config)
        self.meta = put_groups(self.plane)
        timeouts = TimeoutsConfig(silence_seconds=silence_seconds)
        self.calls: RepeatedCalls = begin_row_worker(config, self.plane, timeouts, at_once=at_once)
        self.keeper = RowKeeper(self.plane, self.calls)
        self.lost: list[str] = []
        self.calls.listen(lambda lost, count: self.lost.append(str(lost)))

    async def held_by_a_killed_worker(self, call: Any, *args: Any) -> Any:
        """Make a blocking call while the worker is stopped, and kill the worker in the middle of it."""
        await self.calls.call("read_samples", self.meta.subset([]))  # it is built
        pid = self.calls.pid
        assert pid is not None
        stop(pid)
        calling = asyncio.create_task(asyncio.to_thread(call, *args))
        handle = self.calls._handle
        assert isinstance(handle, ProcessWorker)
        async with asyncio.timeout(LONG):
            while not handle._open:  # noqa: ASYNC110 - another thread is about to call
                await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        result = await asyncio.wait_for(calling, LONG)
        assert not alive(pid)
        assert self.calls.pid != pid
        return result


@pytest.fixture(params=["memory", pytest.param("shm", marks=pytest.mark.long)])
async def rows(request: pytest.FixtureRequest) -> AsyncIterator[Rows]:
    made = Rows(request.param)
    yield made
    await made.calls.close()
    made.plane.close()


@pytest.fixture
async def elsewhere() -> AsyncIterator[Rows]:
    made = Rows("shm")
    yield made
    await made.calls.close()
    made.plane.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_what_was_held_is_written_and_comes_back(rows: Rows, tmp_path: Path) -> None:
    plane, meta, keeper = rows.plane, rows.meta, rows.keeper
    (tmp_path / "expected").mkdir()
    (tmp_path / "found").mkdir()
    archive.save_rows(tmp_path / "expected", plane.get_samples(meta, NAMES))
    held = await keeper.hold(meta, NAMES)
    plane.clear_samples(meta.sample_ids, "p")
    await asyncio.to_thread(held.save, tmp_path / "found")
    assert content(tmp_path / "found") == content(tmp_path / "expected")
    summary = RowsSummary(6, frozenset(NAMES))
    assert await asyncio.to_thread(held.inspect, tmp_path / "found") == summary
    held.release()
    assert await keeper.load(tmp_path / "found", "p") == summary
    (tmp_path / "again").mkdir()
    archive.save_rows(tmp_path / "again", plane.get_samples(meta, NAMES))
    assert content(tmp_path / "again") == content(tmp_path / "expected")


async def test_errors_come_back_as_themselves(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match="nowhere"):
        await rows.keeper.load(tmp_path / "nowhere", "p")
    held = await rows.keeper.hold(rows.meta, NAMES)
    with pytest.raises(OSError, match="no_folder"):
        await asyncio.to_thread(held.save, tmp_path / "no_folder")
    rows.plane.clear_samples(rows.meta.sample_ids[:1], "p")
    with pytest.raises(MissingRowError, match="g0_g0"):
        await rows.calls.call("read_samples", rows.meta)


async def test_texts_are_what_the_rows_say(rows: Rows) -> None:
    texts = WorkerTexts(rows.calls, lambda ids: " ".join(map(str, ids)))
    found = await texts.read(rows.meta.subset([5, 0]))
    assert found == [SampleText("three again", "20 21"), SampleText("one", "0 1")]
    assert [each.rendered_prompt for each in await WorkerTexts(rows.calls).read(rows.meta)] == [""] * 6


async def test_a_thread_has_no_process_of_its_own() -> None:
    plane = MemoryDataPlane()
    calls = begin_row_worker(DataPlaneConfig(), plane, TimeoutsConfig(silence_seconds=LONG))
    assert calls.pid is None, "not even a thread, before the first call"
    await calls.close()
    plane.close()


@pytest.mark.long
async def test_rows_are_saved_by_another_worker_if_the_first_is_killed(elsewhere: Rows, tmp_path: Path) -> None:
    """What was held is the data plane's, not the worker's; half a file is written over."""
    (tmp_path / "expected").mkdir()
    (tmp_path / "found").mkdir()
    archive.save_rows(tmp_path / "expected", elsewhere.plane.get_samples(elsewhere.meta, NAMES))
    held = await elsewhere.keeper.hold(elsewhere.meta, NAMES)
    elsewhere.plane.clear_samples(elsewhere.meta.sample_ids[:4], "p")
    (tmp_path / "found" / "rows.safetensors").write_bytes(b"half of it")
    await elsewhere.held_by_a_killed_worker(held.save, tmp_path / "found")
    assert content(tmp_path / "found") == content(tmp_path / "expected")
    assert len(elsewhere.lost) == 1
    assert "data plane worker" in elsewhere.lost[0]
    assert "SIGKILL" in elsewhere.lost[0]
    held.release()
    elsewhere.plane.clear_samples(elsewhere.meta.sample_ids, "p")
    assert isinstance(elsewhere.plane, ShmOwner)
    async with asyncio.timeout(LONG):
        while elsewhere.plane.store.used:  # noqa: ASYNC110 - the one that took over lets go of it after its answer
            await asyncio.sleep(0.01)


@pytest.mark.long
async def test_rows_are_put_once_if_the_worker_is_killed_while_it_puts_them(elsewhere: Rows, tmp_path: Path) -> None:
    held = await elsewhere.keeper.hold(elsewhere.meta, NAMES)
    await asyncio.to_thread(held.save, tmp_path)
    before = elsewhere.plane.get_samples(elsewhere.meta, NAMES)
    # As if the first worker had come half-way.
    elsewhere.plane.clear_samples(elsewhere.meta.sample_ids[3:], "p")
    loaded = await elsewhere.held_by_a_killed_worker(
        lambda: elsewhere.calls.call_blocking("load_rows", tmp_path, "p", seconds=LONG)
    )
    assert loaded == RowsSummary(6, frozenset(NAMES))
    after = elsewhere.plane.get_samples(elsewhere.meta, NAMES)
    assert elsewhere.plane.count_samples("p") == 6
    assert after.objects(fields.RESPONSE_TEXT) == before.objects(fields.RESPONSE_TEXT)
    assert torch.equal(after.jagged(fields.INPUT_IDS).values, before.jagged(fields.INPUT_IDS).values)


@pytest.mark.long
async def test_the_worker_imports_no_modelling_code(elsewhere: Rows) -> None:
    """Its process costs an import of torch, which holds the columns, and nothing more."""
    await elsewhere.calls.call("read_samples", elsewhere.meta)
    maps = await asyncio.to_thread(Path(f"/proc/{elsewhere.calls.pid}/maps").read_text)
    assert "libtorch" in maps
    assert "tokenizers" not in maps


@pytest.mark.long
async def test_a_worker_that_is_stopped_is_replaced() -> None:
    made = Rows("shm", silence_seconds=2.0, at_once=False)
    try:
        assert made.calls.pid is None, "started by its first call"
        first = await made.calls.call("read_samples", made.meta)
        pid = made.calls.pid
        assert pid is not None
        stop(pid)
        async with asyncio.timeout(LONG):
            assert await made.calls.call("read_samples", made.meta) == first
        assert "no sign of life" in made.lost[0]
        assert not alive(pid)
    finally:
        await made.calls.close()
        made.plane.close()

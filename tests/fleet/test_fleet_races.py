"""What crosses in a fleet: ranks that leave or come back while weights change, and engines that are built too late."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.errors import EngineError
from penstock.rollout.fleet import EngineFleet, RankState
from penstock.weights.publication import WeightPublication
from penstock.weights.synchronizer import WeightSynchronizer
from tests.fleet.manual_engine import ManualEngine, asked, fleet_of, settled
from tests.support.publications import without_tensors


@pytest.mark.parametrize("way_out", ["remove_rank", "vacate", "sleep"])
async def test_a_weight_sync_does_not_bring_a_rank_back_that_is_leaving(way_out: str) -> None:
    may_preempt, in_apply, may_apply = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(ManualEngine):
        async def preempt(self) -> None:
            await may_preempt.wait()
            await super().preempt()

        async def apply(self, publication: WeightPublication) -> None:
            in_apply.set()
            await may_apply.wait()
            await super().apply(publication)

    leaver, stayer = Slow("a"), ManualEngine("b")
    fleet = EngineFleet([leaver, stayer])
    call = asyncio.create_task(fleet.generate(asked("r", 1)))
    await settled()
    assert leaver.running
    syncing = asyncio.create_task(WeightSynchronizer(fleet.receivers).publish(without_tensors(1)))
    await in_apply.wait()
    leaving = asyncio.create_task(getattr(fleet, way_out)("a"))
    await settled()
    assert [rank.name for rank in fleet.receivers()] == ["b"]
    may_apply.set()
    await syncing
    assert fleet.router.active == ("b",)
    may_preempt.set()
    await leaving
    await settled()
    stayer.draw()
    assert (await call).token_versions == (1,)
    assert fleet.router.active == ("b",)


@pytest.mark.parametrize("was_stale", [False, True])
async def test_a_rank_that_resumes_too_late_does_not_come_back(was_stale: bool) -> None:
    late, ended = asyncio.Event(), asyncio.Event()

    class Late(ManualEngine):
        async def resume(self) -> None:
            await late.wait()
            await super().resume()
            ended.set()

    fleet = EngineFleet([ManualEngine("a"), Late("b")])
    if was_stale:
        await fleet.vacate("b")
    report = await WeightSynchronizer(fleet.receivers, 0.5).publish(without_tensors(1))
    assert list(report.failed) == ["b"]
    fleet.out_of_service("b", report.failed["b"])
    late.set()
    await ended.wait()
    await settled()
    assert fleet.rank("b").state is RankState.STALE
    assert fleet.router.active == ("a",)


async def test_an_engine_is_closed_that_was_built_for_a_rank_that_is_no_longer_there() -> None:
    loop, removed = asyncio.get_running_loop(), asyncio.Event()
    new = ManualEngine("a")

    def build(name: str) -> ManualEngine:
        asyncio.run_coroutine_threadsafe(removed.wait(), loop).result(10)
        return new

    fleet, engines = fleet_of("a", "b", build=build, replacements=1)
    with fleet.kept():
        engines["a"].die()
        await settled()
        replacing = asyncio.create_task(fleet.replace("a"))
        await settled()
        await fleet.remove_rank("a")
        removed.set()
        with pytest.raises(EngineError, match="engine a was removed"):
            await replacing
    assert new.closed
    assert [rank.name for rank in fleet.ranks] == ["b"]


async def test_a_build_that_does_not_end_counts_as_a_death_and_what_it_makes_is_closed() -> None:
    loop, late, closed = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Closing(ManualEngine):
        async def close(self) -> None:
            closed.set()

    def build(name: str) -> ManualEngine:
        asyncio.run_coroutine_threadsafe(late.wait(), loop).result(10)
        return Closing(name)

    fleet, engines = fleet_of("a", build=build, replacements=1, start_seconds=0.02)
    with fleet.kept():
        engines["a"].die()
        await settled()
        with pytest.raises(EngineError, match=r"not built within 0\.02 s \(runtime\.timeouts\.start_seconds\)"):
            await fleet.replace("a")
        assert fleet.rank("a").deaths == 2
    late.set()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_an_engine_is_closed_that_is_built_in_the_instant_in_which_nobody_waits_any_more() -> None:
    may_build, closed, others = threading.Event(), threading.Event(), set(threading.enumerate())
    made: list[ManualEngine] = []

    class Closing(ManualEngine):
        async def close(self) -> None:
            await super().close()
            closed.set()

    def build(name: str) -> ManualEngine:
        assert may_build.wait(60)
        made.append(Closing(name))
        return made[0]

    fleet, engines = fleet_of("a", build=build, replacements=1)
    with fleet.kept():
        engines["a"].die()
        await fleet.dead.get()
        replacing = asyncio.create_task(fleet.replace("a"))
        await settled()
        may_build.set()
        for thread in set(threading.enumerate()) - others:
            if thread.name == "penstock-build-a":
                thread.join(60)  # it is built then, and the loop does not know it yet
                assert not thread.is_alive()
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
    assert await asyncio.to_thread(closed.wait, 60)
    assert made[0].closed

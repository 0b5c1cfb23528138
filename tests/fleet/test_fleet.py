"""The fleet: requests, membership, death and return of ranks, on engines whose tokens come when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import EngineError, RequestAborted, SetupError
from penstock.rollout.engines.base import EngineHealth
from penstock.rollout.fleet import EngineFleet, RankState
from penstock.rollout.fleet.rank import RankLeft
from penstock.rollout.fleet.states import NEXT, RankStateError, require_next
from penstock.weights.synchronizer import WeightSynchronizer
from tests.fleet.manual_engine import ManualEngine, asked, fleet_of, settled
from tests.support.publications import without_tensors


async def test_requests_of_a_group_go_to_one_rank_and_groups_to_different_ones() -> None:
    fleet, engines = fleet_of("a", "b")
    calls = [asyncio.create_task(fleet.generate(asked(f"{g}{i}", 1, g))) for g in ("x", "y") for i in range(3)]
    await settled()
    assert {frozenset(each.group_id for each in engine.taken) for engine in engines.values()} == {
        frozenset("x"),
        frozenset("y"),
    }
    for engine in engines.values():
        engine.draw()
    assert [(await call).token_ids for call in calls] == [(0,)] * 6


async def test_a_rank_that_leaves_gives_its_requests_back_and_they_go_on_with_their_tokens() -> None:
    fleet, engines = fleet_of("a", "b")
    call = asyncio.create_task(fleet.generate(asked("r", 4)))
    await settled()
    engines["a"].draw()
    engines["a"].draw()
    await fleet.remove_rank("a")
    await settled()
    assert engines["a"].closed
    assert [rank.name for rank in fleet.ranks] == ["b"]
    (again,) = engines["b"].taken
    assert again.generated is not None
    assert again.generated.token_ids == (0, 1)
    engines["b"].version = 7
    engines["b"].draw()
    engines["b"].draw()
    result = await call
    assert (result.token_ids, result.token_versions) == ((0, 1, 2, 3), (0, 0, 7, 7))


async def test_in_deterministic_mode_they_begin_anew() -> None:
    fleet, engines = fleet_of("a", "b", anew=True)
    call = asyncio.create_task(fleet.generate(asked("r", 2)))
    await settled()
    engines["a"].draw()
    await fleet.remove_rank("a")
    await settled()
    assert engines["b"].taken[0].generated is None
    call.cancel()


async def test_without_a_rank_requests_wait_for_the_next_one() -> None:
    fleet, _ = fleet_of("a")
    await fleet.remove_rank("a")
    call = asyncio.create_task(fleet.generate(asked("r", 1)))
    await settled()
    assert fleet.waits_for_engines
    late = ManualEngine("b")
    fleet.add_rank(late, current=True)
    await settled()
    late.draw()
    assert (await call).token_ids == (0,)
    assert not fleet.waits_for_engines


async def test_an_added_rank_serves_after_a_weight_sync_and_not_before() -> None:
    fleet, _ = fleet_of("a")
    late = ManualEngine("b")
    fleet.add_rank(late)
    assert fleet.router.active == ("a",)
    await WeightSynchronizer(fleet.receivers).publish(without_tensors(5))
    assert fleet.router.active == ("a", "b")
    assert late.version == 5
    assert fleet.stats().version == 5


async def test_a_stale_rank_is_not_brought_back_by_resume_alone() -> None:
    fleet, _ = fleet_of("a", "b")
    await fleet.vacate("a")
    rank = fleet.rank("a")
    await rank.pause()
    await rank.resume()
    assert rank.state is RankState.STALE
    await WeightSynchronizer(fleet.receivers).publish(without_tensors(1))
    assert rank.state is RankState.SERVING


async def test_a_rank_sleeps_without_requests_and_is_stale_when_it_wakes() -> None:
    fleet, engines = fleet_of("a", "b")
    call = asyncio.create_task(fleet.generate(asked("r", 2)))
    await settled()
    await fleet.sleep("a", 2)
    assert fleet.rank("a").state is RankState.SLEEPING
    assert engines["a"].calls == ["preempt", "sleep 2"]
    assert fleet.receivers() == (fleet.rank("b"),)
    await fleet.wake("a")
    assert fleet.rank("a").state is RankState.STALE
    assert fleet.router.active == ("b",)
    await settled()
    engines["b"].draw()
    engines["b"].draw()
    assert (await call).token_ids == (0, 1)


async def test_a_rank_that_missed_an_update_gets_no_request_and_loses_those_it_has() -> None:
    fleet, engines = fleet_of("a", "b")
    call = asyncio.create_task(fleet.generate(asked("r", 2)))
    await settled()
    engines["a"].draw()
    fleet.out_of_service("a", "it did not answer")
    await settled()
    engines["b"].draw()
    assert (await call).token_ids == (0, 1)
    assert fleet.router.active == ("b",)


async def test_requests_of_a_dead_rank_go_elsewhere() -> None:
    fleet, engines = fleet_of("a", "b")
    told: list[str] = []
    fleet.emit = lambda event, **facts: told.append(f"{event} {facts['engine']}")
    call = asyncio.create_task(fleet.generate(asked("r", 2)))
    await settled()
    engines["a"].draw()
    engines["a"].die()
    await settled()
    assert fleet.rank("a").state is RankState.DEAD
    assert told == ["engine_lost a"]
    engines["b"].draw()
    engines["b"].draw()
    assert (await call).token_ids == (0, 1)


async def test_when_no_rank_is_left_the_engines_own_error_ends_every_request() -> None:
    fleet, engines = fleet_of("a")
    running = asyncio.create_task(fleet.generate(asked("r", 2)))
    await settled()
    engines["a"].die("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await running
    with pytest.raises(EngineError, match="out of memory"):
        await fleet.generate(asked("s", 2))
    assert fleet.is_lost
    assert fleet.health() is EngineHealth.FAILED


async def test_a_dead_rank_is_replaced_in_place_and_serves_after_a_refresh() -> None:
    fleet, engines = fleet_of("a", build=lambda name: engines.setdefault("new", ManualEngine(name)), replacements=1)
    with fleet.kept():
        call = asyncio.create_task(fleet.generate(asked("r", 1)))
        await settled()
        engines["a"].tokens = 11
        engines["a"].die()
        await settled()
        assert fleet.waits_for_engines
        assert not call.done()
        rank = await fleet.dead.get()
        await fleet.replace(rank.name)
        assert rank.state is RankState.STALE
        assert engines["a"].closed
        await WeightSynchronizer([rank]).publish(without_tensors(3))
        await settled()
        engines["new"].draw()
        assert (await call).token_versions == (3,)
        assert fleet.stats().tokens_generated == 12, "counters go on over the death of an engine"


async def test_an_idle_rank_that_dies_is_noticed() -> None:
    fleet, engines = fleet_of("a", "b")
    with fleet.kept():
        engines["a"].die()
        await settled()
        assert fleet.rank("a").state is RankState.DEAD


async def test_a_rank_that_dies_too_often_in_a_row_is_not_waited_for() -> None:
    built: list[ManualEngine] = []

    def build(name: str) -> ManualEngine:
        built.append(ManualEngine(name))
        return built[-1]

    fleet, engines = fleet_of("a", build=build, replacements=2)
    with fleet.kept():
        dying = engines["a"]
        for _ in range(2):
            dying.die()
            await settled()
            assert not fleet.is_lost
            rank = await fleet.replace("a")
            await WeightSynchronizer([rank]).publish(without_tensors(1))
            dying = built[-1]
        await WeightSynchronizer(fleet.receivers).publish(
            without_tensors(2)
        )  # it has served for a whole step: the count is 0
        for _ in range(2):
            dying.die()
            await settled()
            assert not fleet.is_lost
            await WeightSynchronizer([await fleet.replace("a")]).publish(without_tensors(2))
            dying = built[-1]
        dying.die()
        await settled()
        assert fleet.is_lost


async def test_a_request_that_ranks_die_of_fails_by_itself() -> None:
    fleet, engines = fleet_of("a", "b", "c", "d")
    call = asyncio.create_task(fleet.generate(asked("poison", 1)))
    for _ in range(3):
        await settled()
        next(engine for engine in engines.values() if engine.running).die()
    with pytest.raises(EngineError, match="its process was killed"):
        await call
    assert len(fleet.router.active) == 1


async def test_an_engine_that_refuses_a_request_is_not_dead() -> None:
    fleet, engines = fleet_of("a")

    async def refuse(request: Any) -> Any:
        raise EngineError("not this one")

    engines["a"].generate = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="not this one"):
        await fleet.generate(asked("r"))
    assert fleet.rank("a").state is RankState.SERVING


async def test_abort_reaches_running_and_waiting_requests() -> None:
    fleet, _ = fleet_of("a")
    running = asyncio.create_task(fleet.generate(asked("r")))
    await settled()
    await fleet.abort(["r", "unknown"])
    with pytest.raises(RequestAborted):
        await running
    await fleet.remove_rank("a")
    waiting = asyncio.create_task(fleet.generate(asked("w")))
    await settled()
    await fleet.abort(["w"])
    with pytest.raises(RequestAborted):
        await waiting


async def test_a_request_with_an_old_epoch_is_refused_by_the_rank() -> None:
    fleet, _ = fleet_of("a")
    route = fleet.router.place()
    assert route is not None
    rank = fleet.rank("a")
    rank.go(RankState.STALE)
    with pytest.raises(RankLeft):
        await rank.generate(asked("r"), route)


async def test_closing_ends_running_and_waiting_requests_and_every_engine() -> None:
    fleet, engines = fleet_of("a", "b")
    await fleet.vacate("b")
    running = asyncio.create_task(fleet.generate(asked("r")))
    await settled()
    await fleet.close()
    with pytest.raises(RequestAborted):
        await running
    assert all(engine.closed for engine in engines.values())
    assert fleet.health() is EngineHealth.CLOSED
    await fleet.close()


async def test_a_fleet_without_ranks_is_a_fleet() -> None:
    fleet = EngineFleet()
    assert len(fleet) == 0
    assert fleet.receivers() == ()
    assert fleet.health() is EngineHealth.HEALTHY
    assert fleet.stats().tokens_generated == 0
    assert not fleet.is_lost
    with pytest.raises(SetupError, match=r"rollout\.replay_from"):
        await fleet.generate(asked("r"))
    await fleet.close()


async def test_names_are_unique() -> None:
    with pytest.raises(SetupError, match="names must be unique"):
        fleet_of("a")[0].add_rank(ManualEngine("a"))
    with pytest.raises(SetupError, match="names must be unique"):
        EngineFleet([ManualEngine("a"), ManualEngine("a")])


async def test_stats_are_summed_and_told_by_rank() -> None:
    fleet, engines = fleet_of("a", "b")
    engines["a"].tokens, engines["b"].tokens, engines["b"].version = 3, 4, 2
    assert fleet.stats().tokens_generated == 7
    assert fleet.stats().version == 0
    assert {name: stats.tokens_generated for name, stats in fleet.rank_stats().items()} == {"a": 3, "b": 4}
    await fleet.remove_rank("a")
    assert fleet.stats().tokens_generated == 7, "what a removed rank has done still counts"
    assert fleet.stats().version == 2


@pytest.mark.parametrize("state", list(RankState))
def test_only_the_transitions_of_the_table_exist(state: RankState) -> None:
    for wanted in RankState:
        if wanted in NEXT[state]:
            require_next("a", state, wanted)
        else:
            with pytest.raises(RankStateError, match=f"a is {state.value}, and cannot become {wanted.value}"):
                require_next("a", state, wanted)

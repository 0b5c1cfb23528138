"""The router: the active set, epochs, waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EngineError
from penstock.rollout.fleet.placement import RankLoad, choose
from penstock.rollout.fleet.router import Route, Router
from penstock.runtime.time_limit import TimeLimit
from tests.fleet.manual_engine import settled


async def test_without_a_rank_requests_wait_and_one_that_joins_gets_them_all() -> None:
    router = Router()
    waiting = [asyncio.create_task(router.route(f"g{i}")) for i in range(3)]
    await settled()
    assert router.waiting == 3
    epoch = router.join("a")
    assert [await task for task in waiting] == [Route("a", epoch)] * 3
    assert router.waiting == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    st.lists(st.sampled_from(["", "g", "h", "i"]), max_size=20),
)
def test_it_places_as_the_pure_function_says(ranks: list[tuple[int, bool]], groups: list[str]) -> None:
    router, homes = Router(), dict[str, str]()
    loads = {f"r{number}": [0, slots, silent] for number, (slots, silent) in enumerate(ranks)}
    for name, (_, slots, silent) in loads.items():
        router.join(name, slots, lambda silent=silent: bool(silent))  # type: ignore[misc]
    for group in groups:
        wanted = choose([RankLoad(name, *load) for name, load in loads.items()], homes.get(group))  # type: ignore[arg-type]
        placed = router.place(group)
        assert placed is not None
        assert placed.rank == wanted
        loads[placed.rank][0] += 1
        if group:
            homes[group] = placed.rank


async def test_a_rank_from_another_thread_wakes_those_who_wait() -> None:
    router = Router()
    waiting = asyncio.create_task(router.route())
    await settled()
    threading.Thread(target=router.join, args=("a",)).start()
    assert (await asyncio.wait_for(waiting, 10)).rank == "a"


async def test_a_rank_that_comes_back_has_another_epoch() -> None:
    router = Router()
    first = router.join("a")
    router.leave("a")
    assert router.place() is None
    assert router.join("a") > first


async def test_a_rank_is_idle_when_its_last_request_is_over_also_those_of_an_earlier_epoch() -> None:
    router = Router()
    router.join("a")
    first, second = router.place(), router.place()
    assert first is not None
    assert second is not None
    router.leave("a")
    idle = asyncio.create_task(router.idle("a"))
    router.done(first)
    await settled()
    assert not idle.done()
    router.done(second)
    await asyncio.wait_for(idle, 10)


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    router = Router()
    waiting = asyncio.create_task(router.route())
    await settled()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert router.waiting == 0
    router.join("a", slots=1)
    assert router.place() is not None


async def test_when_nothing_can_come_back_waiting_requests_are_told_why() -> None:
    router = Router()
    waiting = asyncio.create_task(router.route())
    await settled()
    router.refuse(lambda: EngineError("the last one is gone"))
    with pytest.raises(EngineError, match="the last one is gone"):
        await waiting
    with pytest.raises(EngineError, match="the last one is gone"):
        await router.route()
    router.join("a")
    assert (await router.route()).rank == "a"


async def test_waiting_for_a_rank_does_not_count_against_a_time_limit() -> None:
    router = Router()

    async def limited() -> Route:
        async with TimeLimit(0.05):
            return await router.route()

    waiting = asyncio.create_task(limited())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    router.join("a")
    assert (await waiting).rank == "a"


async def test_the_rest_of_a_time_limit_counts_after_the_wait() -> None:
    router = Router()

    async def limited() -> None:
        async with TimeLimit(0.05):
            await router.route()
            await asyncio.sleep(60)

    waiting = asyncio.create_task(limited())
    await asyncio.sleep(0.1)
    router.join("a")
    with pytest.raises(TimeoutError):
        await waiting

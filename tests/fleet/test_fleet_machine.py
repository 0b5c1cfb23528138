"""Ranks come, leave, die and return in any order while requests run: every request has one end, the right one."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import EngineError
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.fleet import EngineFleet, RankState
from penstock.weights.synchronizer import WeightSynchronizer
from tests.fleet.manual_engine import ManualEngine, asked, settled
from tests.support.publications import without_tensors

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("ask", "ask", "ask", "draw", "draw", "draw", "add", "remove", "sleep", "wake", "die", "replace", "publish")
        ),
        st.integers(0, 7),
    ),
    max_size=40,
)


@dataclass
class Machine:
    """A fleet, and what it must be true to: after each action the engines are compared with it."""

    anew: bool
    fleet: EngineFleet = field(init=False)
    version: int = 0
    names: int = 2
    engines: list[ManualEngine] = field(default_factory=list)
    calls: dict[str, asyncio.Task[GenerationResult]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)
    """How many ranks have died under each request."""
    left: dict[int, int] = field(default_factory=dict)
    """Engines that have left, by identity, and how many requests each had taken by then."""

    def __post_init__(self) -> None:
        self.engines = [self._build(name) for name in ("e-0", "e-1")]
        self.fleet = EngineFleet(self.engines, anew=self.anew, build=self._rebuild, replacements=10**6)

    def _build(self, name: str) -> ManualEngine:
        return ManualEngine(name, slots=2, version=self.version)

    def _rebuild(self, name: str) -> ManualEngine:
        self.engines.append(self._build(name))
        return self.engines[-1]

    def engine(self, name: str) -> ManualEngine:
        found = self.fleet.rank(name).engine
        assert isinstance(found, ManualEngine)
        return found

    def pick(self, number: int, *states: RankState) -> str | None:
        fitting = [rank.name for rank in self.fleet.ranks if not states or rank.state in states]
        return fitting[number % len(fitting)] if fitting else None

    async def act(self, action: str, number: int) -> None:
        if action == "ask":
            name = f"r{len(self.calls)}"
            self.lengths[name] = 1 + number % 4
            request = asked(name, self.lengths[name], f"g{number % 3}")
            self.calls[name] = asyncio.create_task(self.fleet.generate(request))
        elif action == "draw":
            for rank in self.fleet.ranks:
                self.engine(rank.name).draw()
        elif action == "add":
            self.names += 1
            self.engines.append(self._build(f"e-{self.names}"))
            self.fleet.add_rank(self.engines[-1], current=number % 2 == 0)
        elif action == "publish":
            self.version += 1
            await WeightSynchronizer(self.fleet.receivers).publish(without_tensors(self.version))
        elif (name_of := self.pick(number, *self._fitting(action))) is not None:
            await self._change(action, name_of)
        await settled()
        self.check()

    @staticmethod
    def _fitting(action: str) -> tuple[RankState, ...]:
        running = (RankState.SERVING, RankState.STALE)
        return {
            "remove": running,
            "sleep": running,
            "wake": (RankState.SLEEPING,),
            "die": (*running, RankState.SLEEPING),
            "replace": (RankState.DEAD,),
        }[action]

    async def _change(self, action: str, name: str) -> None:
        engine = self.engine(name)
        if action == "remove":
            await self.fleet.remove_rank(name)
        elif action == "sleep":
            await self.fleet.sleep(name)
        elif action == "wake":
            await self.fleet.wake(name)
        elif action == "replace":
            await self.fleet.replace(name)
        else:
            self.losses.update(list(engine.running))
            engine.die()
        if action in ("remove", "sleep", "die"):
            self.left[id(engine)] = len(engine.taken)
            assert not engine.running or action == "die"
        else:
            self.left.pop(id(engine), None)

    def check(self) -> None:
        serving = {rank.name for rank in self.fleet.ranks if rank.state is RankState.SERVING}
        assert set(self.fleet.router.active) == serving
        for engine in self.engines:
            taken_when_it_left = self.left.get(id(engine))
            back = any(rank.engine is engine and rank.is_active for rank in self.fleet.ranks)
            if taken_when_it_left is not None and not back:
                assert len(engine.taken) == taken_when_it_left, "a request reached a rank that had left"
        inside = [name for engine in self.engines for name in engine.running]
        assert len(inside) == len(set(inside)), "a request is in two ranks"
        unfinished = {name for name, call in self.calls.items() if not call.done()}
        assert set(inside) <= unfinished
        waiting = unfinished - set(inside)
        assert not (waiting and serving), "a request waits although a rank serves"

    async def finish(self) -> None:
        """With a rank that serves, everything comes to its end."""
        self.engines.append(self._build("last"))
        self.fleet.add_rank(self.engines[-1], current=True)
        for _ in range(200):
            await settled()
            if all(call.done() for call in self.calls.values()):
                break
            for engine in self.engines:
                engine.draw()
        for name, call in self.calls.items():
            if self.losses[name] > 2:  # it may be what they died of
                assert isinstance(call.exception(), EngineError)
                continue
            result = await call
            assert result.request_id == name
            assert result.finish_reason is FinishReason.LENGTH
            assert result.token_ids == tuple(range(self.lengths[name])), "tokens are lost, repeated or out of order"
            assert len(result.token_versions) == self.lengths[name]
            assert list(result.token_versions) == sorted(result.token_versions)


@settings(max_examples=100, deadline=None)
@given(ACTIONS, st.booleans())
def test_every_request_has_one_end_whatever_happens_to_the_ranks(actions: list[tuple[str, int]], anew: bool) -> None:
    async def run() -> None:
        machine = Machine(anew)
        with machine.fleet.kept():
            for action, number in actions:
                await machine.act(action, number)
            await machine.finish()
        await machine.fleet.close()

    asyncio.run(run())

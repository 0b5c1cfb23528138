"""Groups that become too old are normal work: their prompts go first the next time, and none is lost to it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.base import SlotView
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.windowed import Windowed
from penstock.buffer.slots import Clock, Slot
from penstock.controller.bookkeeping.ledger import Ledger
from penstock.controller.bookkeeping.work_queue import WorkQueue
from penstock.errors import TooManyDrops
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.prompts import Prompt, PromptStream
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config

PROMPTS = 24


def over_sampling(window: int, update: str = "in_flight", **sections: Any) -> Any:
    return scripted_config(
        staleness={"policy": "windowed", "max_staleness": window, "over_sampling": True},
        algorithm={"correction": {"kind": "tis"}},
        weight_sync={"mode": update},
        **sections,
    )


def ends(run: ScriptedRun) -> Counter[str]:
    """How often each prompt was trained."""
    visits = [run.controller.ledger.state()[0][place] for place in range(run.prompts)]
    return Counter(str(place) for place, end in enumerate(visits) if end == 1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    window=st.integers(0, 1),
    update=st.sampled_from(["in_flight", "drain", "abort_stale"]),
    room=st.integers(2, 24),
    inflight=st.integers(1, 24),
    groups=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_a_healthy_run_trains_every_prompt_once_and_drops_none(
    window: int, update: str, room: int, inflight: int, groups: int, seed: int
) -> None:
    """Whatever the buffer's size: with room for all of the data, the last prompts are evicted a dozen times."""
    dice = random.Random(seed)
    slow = {dice.randrange(PROMPTS) for _ in range(3)}

    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(0.02 if request.prompt_ids[0] in slow else 0.002 * dice.random(), token_ids=(3, 4))

    config = over_sampling(
        window,
        update,
        rollout={"max_inflight_groups": inflight, "failure": {"max_redispatches": 1}},
        buffer={"max_buffered_groups": max(room, groups)},
        training={"prompt_groups_per_step": groups},
    )
    run = ScriptedRun(config, prompts=PROMPTS, script=script, trainer=ScriptedTrainer(lambda meta: 0.001))
    assert asyncio.run(run.run(limit_seconds=30.0)) == "data_exhausted"
    assert ends(run) == Counter(str(i) for i in range(PROMPTS))
    assert run.names("prompt_dropped") == []


async def test_a_prompt_that_is_always_aborted_is_trained_when_no_other_is_left() -> None:
    def script(request: GenerationRequest) -> ScriptedResponse:
        others_left = run.buffer.clock.step < 9
        return ScriptedResponse(seconds=30.0 if request.prompt_ids[0] == 0 and others_left else 0.0)

    config = over_sampling(
        1, "abort_stale", rollout={"failure": {"max_redispatches": 1}}, buffer={"max_buffered_groups": 6}
    )
    run = ScriptedRun(config, prompts=40, script=script)
    assert await run.run() == "data_exhausted"
    assert len(run.names("group_aborted")) > 2
    assert run.names("prompt_dropped") == []
    assert ends(run)["0"] == 1


async def test_no_new_prompt_is_dispatched_while_an_evicted_one_waits() -> None:
    """A step takes 2 of 6 groups; the others are too old then, while the next prompt waits for a permit already."""
    dispatched: Counter[int] = Counter()
    overtaken: list[int] = []

    def script(request: GenerationRequest) -> ScriptedResponse:
        prompt = request.prompt_ids[0]
        if request.request_id.endswith("_g0_t0"):
            evicted = Counter(int(event["prompt_id"]) for event in run.names("group_evicted"))
            waiting = [other for other in evicted if dispatched[other] <= evicted[other]]
            dispatched[prompt] += 1
            overtaken.extend([prompt] if waiting and dispatched[prompt] == 1 else [])
        return ScriptedResponse(0.0)

    config = over_sampling(0, buffer={"max_buffered_groups": 6}, training={"prompt_groups_per_step": 2})
    run = ScriptedRun(config, prompts=12, script=script, trainer=ScriptedTrainer(lambda meta: 0.01))
    await run.run()
    assert run.names("group_evicted")
    assert overtaken == []


def test_what_came_back_goes_in_the_order_of_the_stream_and_before_what_is_waiting() -> None:
    prompts = [Prompt(str(i), str(i)) for i in range(5)]
    ledger = Ledger(PromptStream(prompts, epochs=1, shuffle=False, seed=0))
    queue = WorkQueue(ledger, ReplayBuffer(Windowed(2), 4))
    visits = [ledger.take() for _ in range(3)]
    assert all(visits)
    queue.put_back(replace(visits[1], redispatches=1))  # type: ignore[type-var]
    queue.put_back(replace(visits[0], redispatches=1))  # type: ignore[type-var]
    first = queue.first(visits[2])  # type: ignore[arg-type]
    assert first.position == 0

    async def rest() -> list[int]:
        return [(await queue.next()).position for _ in range(4)]

    assert asyncio.run(rest()) == [1, 2, 3, 4]


class ThrowsAway(OnPolicy):
    """Evicts every ready group at once, whatever its version: it trains nothing of what it asks for."""

    def select(self, clock: Clock, slots: SlotView, max_groups: int) -> list[Slot]:
        return []

    def selectable(self, clock: Clock, slots: SlotView) -> int:
        return 0

    def evict(self, clock: Clock, slots: SlotView) -> list[Slot]:
        return [slot for bucket in slots.buckets() for slot in slots.ready(bucket)]


async def test_a_policy_that_throws_away_what_it_asks_for_ends_the_run_and_not_goes_round_for_ever() -> None:
    config = scripted_config(
        staleness={"policy": "custom", "import_path": f"{__name__}:ThrowsAway"},
        rollout={"failure": {"max_redispatches": 3}},
    )
    run = ScriptedRun(config, prompts=8)
    with pytest.raises(TooManyDrops, match=r"evicted 4 times with the weights .*max_redispatches"):
        await run.run()

"""No group, and no token of it, is trained with a larger lag than its policy promises, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import EnvironmentFailure
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.prompts import Prompt
from penstock.training.interface import ChunkResult
from penstock.training.workers.scripted import ScriptedTrainer
from penstock.weights.publication import WeightPublication, WeightSite
from tests.support.scripted_run import ScriptedRun, scripted_config

Sampler = dict[str, Any]

SMALL = st.integers(0, 2)
SAMPLERS: dict[str, st.SearchStrategy[Sampler]] = {
    "on_policy": st.fixed_dictionaries({}),
    "windowed": st.fixed_dictionaries(
        {"max_staleness": SMALL, "over_sampling": st.booleans(), "order": st.sampled_from(["oldest", "freshest"])}
    ),
    "in_order": st.fixed_dictionaries({"lookahead": SMALL}),
    "weight_fifo": SMALL.flatmap(
        lambda window: st.fixed_dictionaries({"max_staleness": st.just(window), "lookahead": st.integers(0, window)})
    ),
}
UPDATES: dict[str, tuple[str, ...]] = {
    "on_policy": ("in_flight", "drain", "abort_stale"),
    "windowed": ("in_flight", "drain", "abort_stale"),
    "in_order": ("in_flight", "drain"),
    "weight_fifo": ("in_flight", "drain"),
}
"""What the configuration allows with each policy."""
COMBINATIONS = [(kind, update) for kind, updates in UPDATES.items() for update in updates]
PROMPTS = 30


def bound(sampler: Sampler) -> int:
    """What docs/staleness.md promises."""
    return {"on_policy": 0, "in_order": sampler.get("lookahead")}.get(sampler["policy"], sampler.get("max_staleness"))  # type: ignore[return-value]


@dataclass
class LagTrainer(ScriptedTrainer):
    """Notes, as each chunk trains, how old its oldest token is; its weights take their time to the engine."""

    publish_seconds: float = 0.0
    token_lags: list[int] = field(default_factory=list)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        self.token_lags += [self.version - tag["first_version"] for tag in meta.tags]
        return await super().train_microbatch(step_id, meta)

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        publication = await super().publish_weights(sites)
        await asyncio.sleep(self.publish_seconds)
        return publication


@dataclass
class Rewards:
    """Some calls fail, and some prompts' samples are all worth the same, so that dynamic sampling replaces them."""

    failing: float
    flat: float
    random: random.Random
    calls: Counter[str] = field(default_factory=Counter)

    def __call__(self, prompt: Prompt) -> float:
        if self.random.random() < self.failing:
            raise EnvironmentFailure("this time")
        self.calls[prompt.prompt_id] += 1
        is_flat = int(prompt.prompt_id) < self.flat * PROMPTS
        return 1.0 if is_flat else float(self.calls[prompt.prompt_id] % 2)


@dataclass(frozen=True)
class Weather:
    """Everything that may happen to a run from outside."""

    groups_per_step: int
    chunk: int
    inflight: int
    generation_ms: tuple[int, int]
    training_ms: int
    publish_ms: int
    failing: float
    flat: float
    seed: int


WEATHER = st.builds(
    Weather,
    groups_per_step=st.integers(1, 4),
    chunk=st.integers(1, 2),
    inflight=st.integers(1, 12),
    generation_ms=st.tuples(st.integers(0, 2), st.integers(0, 6)),
    training_ms=st.integers(0, 3),
    publish_ms=st.integers(0, 6),
    failing=st.sampled_from([0.0, 0.1, 0.3]),
    flat=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 10**6),
)


def run_in(weather: Weather, sampler: Sampler, update: str) -> tuple[ScriptedRun, LagTrainer]:
    """A run that has not begun, and its trainer."""
    dice = random.Random(weather.seed)
    low, more = weather.generation_ms
    config = scripted_config(
        staleness=sampler,
        weight_sync={"mode": update},
        algorithm={
            "correction": {"kind": "tis"},
            "dynamic_sampling": {"enabled": True},
        },
        buffer={"max_buffered_groups": 32},
        training={
            "prompt_groups_per_step": weather.groups_per_step,
            "min_groups_per_chunk": min(weather.chunk, weather.groups_per_step),
        },
        rollout={
            "max_inflight_groups": weather.inflight,
            "failure": {
                "max_dropped_prompts": PROMPTS,
                "on_drop": "replace",
                "data_attempts": 3,
                "max_redispatches": 1000,
            },
        },
    )
    trainer = LagTrainer(
        chunk_seconds=lambda meta: 0.001 * weather.training_ms, publish_seconds=0.001 * weather.publish_ms
    )

    def script(request: GenerationRequest) -> ScriptedResponse:
        return ScriptedResponse(0.001 * (low + more * dice.random()), token_ids=(3, 4, 5))

    rewards = Rewards(weather.failing, weather.flat, random.Random(weather.seed + 1))
    return ScriptedRun(config, prompts=PROMPTS, script=script, reward=rewards, trainer=trainer), trainer


def lag_max(run: ScriptedRun) -> int:
    return int(max((step.get("staleness/lag_max", 0.0) for step in run.steps), default=0.0))


def check_lags(kind: str, update: str, weather: Weather, data: st.DataObject) -> None:
    sampler = {"policy": kind, **data.draw(SAMPLERS[kind])}
    run, trainer = run_in(weather, sampler, update)
    assert asyncio.run(run.run(limit_seconds=60.0)) == "data_exhausted"
    assert lag_max(run) <= bound(sampler)
    assert max(trainer.token_lags, default=0) <= bound(sampler)
    ends = len(run.trained_groups) + len(run.names("group_filtered")) + len(run.names("prompt_dropped"))
    assert ends == PROMPTS
    assert run.rows_left == 0


@pytest.mark.parametrize(("kind", "update"), COMBINATIONS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(weather=WEATHER, data=st.data())
def test_no_lag_is_larger_than_the_policy_promises(
    kind: str, update: str, weather: Weather, data: st.DataObject
) -> None:
    check_lags(kind, update, weather, data)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "update"), COMBINATIONS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(weather=WEATHER, data=st.data())
def test_nor_in_any_weather(kind: str, update: str, weather: Weather, data: st.DataObject) -> None:
    check_lags(kind, update, weather, data)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
async def test_groups_dispatched_while_new_weights_are_under_way_are_no_older_than_promised(lookahead: int) -> None:
    """Generation is ready long before the weights arrive: what is dispatched then begins with the old ones."""
    trainer = LagTrainer(publish_seconds=0.02)
    sampler = {"policy": "in_order", "lookahead": lookahead}
    run = ScriptedRun(scripted_config(staleness=sampler), prompts=40, trainer=trainer)
    assert await run.run() == "data_exhausted"
    assert lag_max(run) == lookahead
    assert max(trainer.token_lags) <= lookahead


async def test_a_lag_beyond_the_bound_would_be_seen() -> None:
    """The same measure shows a policy that promises nothing for what it is."""
    trainer = LagTrainer(publish_seconds=0.02)
    config = scripted_config(
        staleness={"policy": "ready_first", "lookahead": 1}, algorithm={"correction": {"kind": "tis"}}
    )
    run = ScriptedRun(config, prompts=40, trainer=trainer)
    await run.run()
    assert lag_max(run) > 1
    assert max(trainer.token_lags) > 1

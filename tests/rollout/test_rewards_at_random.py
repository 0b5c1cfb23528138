"""Good and bad rewards at random, many at a time: every call has the outcome of its kind, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from penstock.errors import EnvironmentFailure
from penstock.rollout.environments.rewards.process_pool import ProcessRewardPool

OUTCOMES = {
    "well": "1.0",
    "noted": "1.0",
    "exits": "ended with code 3",
    "busy_loop": "took longer than 1.5 s",
    "interrupts": "raised KeyboardInterrupt",
    "loses_its_judge": "raised ValueError: no verdict",
    "closes_all": "ended with code 1",
    "cancelled": "cancelled",
}
WEIGHTS = (40, 20, 3, 1, 3, 5, 2, 3)


async def play(pool: ProcessRewardPool, kind: str, file: Path, rng: random.Random) -> str:
    await asyncio.sleep(rng.random() * 0.3)
    called = "busy_loop" if kind == "cancelled" else kind
    args = (str(file), rng.choice([0.0, 0.0, 0.1])) if kind == "noted" else ()
    call = asyncio.create_task(pool.score(f"tests.support.misbehaving_rewards:{called}", args))
    if kind == "cancelled":
        await asyncio.sleep(rng.random() * 0.05)
        call.cancel()
    try:
        return str(await call)
    except asyncio.CancelledError:
        return "cancelled"
    except EnvironmentFailure as error:
        return str(error)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
async def test_every_call_has_the_outcome_of_its_kind(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    before = descriptors()
    pool = ProcessRewardPool(rng.choice([1, 2, 4]), 1.5)
    kinds = rng.choices(list(OUTCOMES), WEIGHTS, k=200)
    async with asyncio.timeout(200):
        outcomes = await asyncio.gather(*(play(pool, kind, tmp_path / "calls", rng) for kind in kinds))
    await pool.close()
    wrong = [(kind, outcome) for kind, outcome in zip(kinds, outcomes, strict=True) if OUTCOMES[kind] not in outcome]
    assert wrong == []
    calls = (tmp_path / "calls").read_text(encoding="ascii").splitlines()
    assert len(calls) == kinds.count("noted"), "each call is made once"
    assert not pool._killed
    assert descriptors() == before

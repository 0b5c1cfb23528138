"""Calls of a trainer have a limit, and one that is stuck is not waited for again."""

from __future__ import annotations

import asyncio
import re

import pytest

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import TrainerStuck
from penstock.training.guarded import GuardedTrainer
from penstock.training.workers.scripted import ScriptedSnapshot, ScriptedTrainer
from tests.support.clocks import StoppableClock

META = KVBatchMeta("rollouts", ("g_g0",), frozenset(), (3,), ({},))


class Gated(ScriptedTrainer):
    """Chunks end, one at a time, when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Semaphore(0)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta):  # type: ignore[no-untyped-def]
        await self.gate.acquire()
        return await super().train_microbatch(step_id, meta)

    async def snapshot(self) -> ScriptedSnapshot:
        await self.gate.acquire()
        return await super().snapshot()

    async def close(self) -> None:
        await self.gate.acquire()


def guarded(trainer: ScriptedTrainer, seconds: float = 0.2, snapshot: float = 60.0) -> GuardedTrainer:
    return GuardedTrainer(trainer, call_seconds=seconds, snapshot_seconds=snapshot)


async def test_it_says_which_call_it_is_in_and_what_waits_behind() -> None:
    trainer = Gated()
    guard = guarded(trainer, 60.0)
    assert guard.activity() == "idle"
    await guard.begin_train_step(0)
    calls = [asyncio.create_task(guard.train_microbatch(0, META)) for _ in range(2)]
    await asyncio.sleep(0)
    assert re.fullmatch(r"in train_microbatch for \d+\.\d s, 1 more waiting", guard.activity())
    trainer.gate.release()
    trainer.gate.release()
    assert [result.valid_sequences for result in await asyncio.gather(*calls)] == [1.0, 1.0]
    assert guard.activity() == "idle"


async def test_a_call_that_does_not_come_back_is_stuck_and_so_is_all_that_follows() -> None:
    guard = guarded(Gated())
    await guard.begin_train_step(0)
    async with asyncio.timeout(30):
        calls = [asyncio.create_task(guard.train_microbatch(0, META)) for _ in range(2)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TrainerStuck, TrainerStuck]
        with pytest.raises(TrainerStuck, match=r"train_microbatch did not return within 0\.2 s \(runtime\.timeouts"):
            await guard.abort_train_step(0)
        await guard.close()
    assert guard.activity().startswith("stuck: the trainer's call train_microbatch")


async def test_a_call_that_waits_for_its_turn_has_its_time_from_then_on() -> None:
    trainer = Gated()
    guard = guarded(trainer, 1.0)
    await guard.begin_train_step(0)
    calls = [asyncio.create_task(guard.train_microbatch(0, META)) for _ in range(4)]
    for _ in calls:
        await asyncio.sleep(0.3)  # far from the limit, also on a busy machine; all four together are beyond it
        trainer.gate.release()
    assert len(await asyncio.gather(*calls)) == 4


async def test_a_snapshot_has_the_limit_of_checkpoints() -> None:
    trainer = Gated()
    guard = guarded(trainer, 0.05, snapshot=60.0)
    copying = asyncio.create_task(guard.snapshot())
    await asyncio.sleep(0.15)
    assert not copying.done()
    trainer.gate.release()
    assert await copying == ScriptedSnapshot(0)
    with pytest.raises(TrainerStuck, match=r"runtime\.timeouts\.checkpoint_seconds"):
        await guarded(trainer, 60.0, snapshot=0.05).snapshot()


async def test_a_call_whose_caller_was_cancelled_is_under_way_until_the_trainer_comes_back() -> None:
    trainer = Gated()
    guard = guarded(trainer, 60.0)
    await guard.begin_train_step(0)
    calls = [asyncio.create_task(guard.train_microbatch(0, META)) for _ in range(2)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await asyncio.sleep(0.01)
    assert guard.activity().startswith("in train_microbatch for ")
    assert "waiting" not in guard.activity(), "the one that waited for its turn is withdrawn"
    trainer.gate.release()
    await asyncio.sleep(0.01)
    assert guard.activity() == "idle"


async def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppableClock(monkeypatch)
    trainer = Gated()
    guard = GuardedTrainer(trainer, call_seconds=20, snapshot_seconds=20, clock=clock)
    await guard.begin_train_step(0)
    call = asyncio.create_task(guard.train_microbatch(0, META))
    await asyncio.sleep(0.01)
    clock.stopped_for(3600)
    await asyncio.sleep(0.01)
    assert not call.done()
    trainer.gate.release()
    assert (await call).valid_sequences == 1.0


async def test_what_to_raise_is_said() -> None:
    guard = guarded(Gated(), 0.05)
    with pytest.raises(TrainerStuck, match=r"raise runtime\.timeouts\.trainer_seconds$"):
        await guard.train_microbatch(0, META)

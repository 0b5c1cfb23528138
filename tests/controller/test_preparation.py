"""Columns that the trainer adds before a chunk is scored: failures, stops, and the whole step at once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from penstock.buffer.slots import SlotState
from penstock.controller.pumps.advantage import AdvantagePump, ScoredChunk
from penstock.data_plane import fields
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.runtime.local import WorkerThread
from penstock.training.interface import Prepared
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config

KL = {"kl": {"coefficient": 0.1}}


@dataclass
class PreparingTrainer(ScriptedTrainer):
    """Writes reference log-probs from a thread, as a real trainer does; cancelling the call does not stop it."""

    plane: Any = None
    seconds: float = 0.0
    failures: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    thread: WorkerThread = field(default_factory=lambda: WorkerThread("trainer"))

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        self.begun.set()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        return await self.thread.call(self._write, meta)

    def _write(self, meta: KVBatchMeta) -> Prepared:
        time.sleep(self.seconds)
        rows = [torch.zeros(length) for length in meta.sequence_lengths]
        column = JaggedColumn.from_rows(rows)
        self.plane.put_samples(meta.sample_ids, {fields.REFERENCE_LOGPROBS: column}, meta.partition_id)
        return Prepared(meta.with_fields(fields.REFERENCE_LOGPROBS), self.seconds)


def preparing(**settings: Any) -> ScriptedRun:
    run = ScriptedRun(scripted_config(algorithm=KL), prompts=8, trainer=PreparingTrainer(**settings))
    run.trainer.plane = run.data_plane  # type: ignore[attr-defined]
    return run


async def test_every_chunk_is_prepared_and_its_time_counted() -> None:
    run = preparing(seconds=0.01)
    await run.run()
    assert len(run.trained_groups) == 8
    assert all(step["timing/logprobs_s"] >= 0.01 for step in run.steps)
    assert run.rows_left == 0


async def test_a_pass_that_fails_is_tried_again_with_the_step() -> None:
    run = preparing(failures=1)
    await run.run()
    assert len(run.trained_groups) == len(set(run.trained_groups)) == 8
    assert len(run.names("step_replayed")) == 1


async def test_a_pass_that_keeps_failing_ends_the_run_with_its_cause() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        await preparing(failures=5).run()


async def test_a_stop_while_columns_are_written_leaves_no_rows() -> None:
    run = preparing(seconds=0.2)
    task = asyncio.create_task(run.run())
    trainer = run.trainer
    assert isinstance(trainer, PreparingTrainer)
    await trainer.begun.wait()
    run.controller.stop("enough")
    assert await task == "enough"
    await trainer.thread.close()
    in_buffer = sum(len(slot.meta) for slot in run.buffer.slots(SlotState.READY) if slot.meta is not None)
    assert run.rows_left == in_buffer


async def test_whole_step_advantages_wait_for_a_stale_group_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last group under way is too old when it commits: its prompt is generated again before the step is scored."""
    sizes: list[int] = []
    score = AdvantagePump._score

    async def counted(self: AdvantagePump, meta: KVBatchMeta) -> ScoredChunk:
        sizes.append(len(meta.group_ids))
        return await score(self, meta)

    monkeypatch.setattr(AdvantagePump, "_score", counted)
    seen: set[str] = set()

    def first_is_slow(request: GenerationRequest) -> ScriptedResponse:
        slow = request.prompt_ids == (0,) and request.group_id not in seen and len(seen) == 0
        if request.prompt_ids == (0,):
            seen.add(request.group_id)
        return ScriptedResponse(seconds=0.4 if slow or request.group_id in list(seen)[:1] else 0.0)

    config = scripted_config(
        staleness={"policy": "windowed", "max_staleness": 1},
        algorithm={"advantage": {"kind": "reinforce_pp"}},
        training={"prompt_groups_per_step": 4, "min_groups_per_chunk": 4},
    )
    run = ScriptedRun(config, prompts=12, script=first_is_slow)
    await run.run()
    assert sizes == [4, 4, 4]
    assert len(run.names("group_evicted")) == 1

"""Busy times and overlap."""

from __future__ import annotations

import asyncio

import pytest

from penstock.controller.bookkeeping.throughput import TRAINER_BUSY
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.training.interface import Prepared
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config


class Preparing(ScriptedTrainer):
    """Log-probs of the reference policy take twice as long as training."""

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        async with self._turn:
            await asyncio.sleep(0.02)
        return Prepared(meta, 0.02)


async def test_overlap_is_at_least_the_share_of_either_side_with_a_kl_penalty() -> None:
    config = scripted_config(algorithm={"kl": {"coefficient": 0.1}})
    trainer = Preparing(chunk_seconds=lambda meta: 0.01)
    run = ScriptedRun(config, prompts=12, trainer=trainer, script=lambda request: ScriptedResponse(0.005))
    await run.run()
    before = 0.0
    for metrics in run.steps:
        seconds, before = metrics["timing/elapsed_s"] - before, metrics["timing/elapsed_s"]
        assert metrics["timing/logprobs_s"] >= 0.02
        trainer_share = sum(metrics[key] for key in TRAINER_BUSY) / seconds
        engine_share = metrics["timing/generation_busy_s"] / seconds
        assert metrics["timing/overlap_efficiency"] == pytest.approx(max(trainer_share, engine_share), rel=0.15)

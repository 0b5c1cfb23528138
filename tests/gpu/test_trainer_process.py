"""A trainer in a process of its own on a GPU: its weights reach an engine in this process through the GPU's memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.model import ModelConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.runtime.workers import Placement, WorkerKind, WorkerSpec, start
from penstock.training.workers.front import WorkerTrainer
from penstock.weights.digest import tensor_digests
from penstock.weights.hf import load_model
from penstock.weights.plan import Transport
from penstock.weights.synchronizer import WeightSynchronizer
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")


async def test_an_engine_of_this_process_serves_what_it_publishes(tmp_path: Path) -> None:
    model, plane = ModelConfig(path=str(save_tiny_model(tmp_path / "model"))), ShmOwner(1_000_000)
    arguments = {
        "model": model,
        "device": "cuda",
        "seed": 0,
        "data_plane": plane.address(),
        "algorithm": AlgorithmConfig(),
        "training": TrainingConfig(),
        "trainer": {"temperature": 1.0, "threads": 1, "lanes": 1, "longest_row": 64},
    }
    worker = start(
        WorkerSpec("penstock.training.workers.served:serve_local", arguments),
        Placement(WorkerKind.PROCESS, "trainer", 1),
    )
    trainer = await asyncio.to_thread(WorkerTrainer, worker, 300.0)
    engine = EmbeddedEngine.from_pretrained(
        model, device="cuda", name="here", max_num_seqs=4, max_model_len=64, awaits_weights=True
    )
    synchronizer = WeightSynchronizer([engine], release=trainer.release_weights)
    try:
        for _ in range(3):  # memory that was released is written again
            report = await synchronizer.publish(await trainer.publish_weights(synchronizer.sites()))
            assert report.transports == {"here": Transport.CUDA_IPC}
        assert await engine.weight_digests() == tensor_digests(load_model(model).named_parameters())
    finally:
        await engine.close()
        await trainer.close()
        plane.close()

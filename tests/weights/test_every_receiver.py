"""Engines of every kind hold what the trainer holds, bit by bit, whatever the model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.model import LoraConfig, ModelConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.training.workers.local import LocalTrainer
from penstock.weights.digest import published_digests, tensor_digests
from penstock.weights.hf import load_model, named_weights
from penstock.weights.lora import attach_lora
from penstock.weights.plan import Transport
from penstock.weights.publication import WeightPublication
from penstock.weights.site import site_of
from penstock.weights.synchronizer import WeightSynchronizer
from tests.support.tiny_models import save_tiny_model

OPTIONS: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "threads": 1}


@asynccontextmanager
async def engines(config: ModelConfig) -> AsyncIterator[tuple[EmbeddedEngine, ProcessEngine]]:
    """One in a thread and one in a process, with the folder's weights."""
    process = EngineProcess(config, "cpu", **OPTIONS, name="process")
    try:
        thread = EmbeddedEngine(load_model(config), **OPTIONS, name="thread")
        remote = ProcessEngine(process)
    except BaseException:
        process.kill()
        raise
    try:
        yield thread, remote
    finally:
        await thread.close()
        await remote.close()


@torch.no_grad()
def train(model: Any, seed: int) -> None:
    """Change everything that a trainer would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


async def check_every_receiver(folder: Path, *, dtype: str = "float32", lora: LoraConfig | None = None) -> None:
    config = ModelConfig(path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    model = load_model(config)
    model = model if lora is None else attach_lora(model, lora)
    trainer = LocalTrainer(model, MemoryDataPlane(), AlgorithmConfig(), TrainingConfig(), temperature=1.0)
    async with engines(config) as receivers:
        synchronizer = WeightSynchronizer(receivers, release=trainer.release_weights)
        for version in range(3):
            train(model, seed=version)
            publication = await trainer.publish_weights([*synchronizer.sites(), site_of()])
            held = published_digests(publication)
            assert held == tensor_digests(named_weights(model))
            report = await synchronizer.publish(publication)
            assert report.transports == {"thread": Transport.IN_PROCESS, "process": Transport.SHARED_MEMORY}
            for receiver in receivers:
                assert await receiver.weight_digests() == held, receiver.name
    await trainer.close()


async def test_a_thread_and_a_process_hold_a_tied_models_weights(tmp_path: Path) -> None:
    await check_every_receiver(save_tiny_model(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
async def test_they_hold_those_of_other_families_untied_in_bf16(tmp_path: Path, family: str) -> None:
    await check_every_receiver(save_tiny_model(tmp_path, family=family, tied=False), dtype="bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_they_hold_merged_adapters(tmp_path: Path, dtype: str) -> None:
    await check_every_receiver(save_tiny_model(tmp_path), dtype=dtype, lora=LoraConfig(rank=4))


@pytest.mark.long
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_lost_while_it_takes_weights_ends_its_own_part_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blow: signal.Signals
) -> None:
    config = ModelConfig(path=str(save_tiny_model(tmp_path)))
    model = load_model(config)
    trainer = LocalTrainer(model, MemoryDataPlane(), AlgorithmConfig(), TrainingConfig(), temperature=1.0)
    real = ProcessEngine.apply

    async def struck(self: ProcessEngine, publication: WeightPublication) -> None:
        os.kill(self.pid, blow)
        await real(self, publication)

    monkeypatch.setattr(ProcessEngine, "apply", struck)
    async with engines(config) as receivers:
        thread, remote = receivers
        synchronizer = WeightSynchronizer(receivers, limit_seconds=2.0, release=trainer.release_weights)
        try:
            train(model, seed=0)
            async with asyncio.timeout(60):
                report = await synchronizer.publish(await trainer.publish_weights(synchronizer.sites()))
            assert report.failed.keys() == {"process"}
            assert await thread.weight_digests() == tensor_digests(named_weights(model))
            train(model, seed=1)
            async with asyncio.timeout(60):
                report = await synchronizer.publish(await trainer.publish_weights(synchronizer.sites()))
            assert report.failed.keys() == {"process"}
            assert await thread.weight_digests() == tensor_digests(named_weights(model))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(remote.pid, signal.SIGCONT)
    await trainer.close()

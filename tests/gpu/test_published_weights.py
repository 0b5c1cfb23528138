"""Weights that go from one process to another on one GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.weights.digest import tensor_digests
from penstock.weights.hf import load_model
from penstock.weights.plan import Transport
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of
from penstock.weights.synchronizer import WeightSynchronizer
from tests.engines.helpers import request
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none")


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher()
    yield publisher
    publisher.close()


@torch.no_grad()
def changed(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.add_(0.25 * torch.randn_like(parameter))
    torch.cuda.synchronize()
    return model


@pytest.mark.parametrize("by_gpu", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_process_on_the_same_gpu_serves_what_was_published(
    tmp_path: Path, publisher: WeightPublisher, by_gpu: bool, dtype: str
) -> None:
    settings = ModelConfig(path=str(save_tiny_model(tmp_path / "model")), dtype=dtype)
    engine = ProcessEngine(EngineProcess(settings, "cuda", max_num_seqs=4, max_model_len=64))
    model = load_model(settings, "cuda")
    synchronizer = WeightSynchronizer([engine])
    try:
        assert engine.site.device == str(torch.cuda.get_device_properties("cuda").uuid)
        for version in range(1, 5):
            site = engine.site if by_gpu else replace(engine.site, device="cpu")
            publication = publisher.publish(version, PolicyWeights.of(changed(model)), [site])
            report = await synchronizer.publish(publication)
            publisher.release(publication)
            wanted = Transport.CUDA_IPC if by_gpu else Transport.SHARED_MEMORY
            assert report.transports == {engine.name: wanted}
            assert await engine.weight_digests() == tensor_digests(model.named_parameters())
            generated = await engine.generate(request(f"r{version}", new=4))
            assert generated.token_versions == (version,) * 4
    finally:
        await engine.close()


async def test_a_process_that_dies_with_the_memory_open_leaves_the_publisher_usable(
    tmp_path: Path, publisher: WeightPublisher
) -> None:
    settings = ModelConfig(path=str(save_tiny_model(tmp_path / "model")))
    model = load_model(settings, "cuda")
    for version in range(1, 3):
        engine = ProcessEngine(EngineProcess(settings, "cuda", max_num_seqs=4, max_model_len=64))
        publication = publisher.publish(version, PolicyWeights.of(changed(model)), [engine.site])
        await engine.prepare(publication)
        if version == 1:
            os.kill(engine.pid, signal.SIGKILL)
        else:
            await engine.pause()
            await engine.apply(publication)
            assert await engine.weight_digests() == tensor_digests(model.named_parameters())
        publisher.release(publication)
        await engine.close()


def test_memory_of_the_gpu_goes_when_the_publisher_is_closed() -> None:
    weights = PolicyWeights.given([("w", torch.ones(64, 2**20, device="cuda"))])
    site = replace(site_of("cuda"), process=1)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    publisher = WeightPublisher()
    for version in range(6):
        publisher.publish(version, weights, [site])
    assert before - torch.cuda.mem_get_info()[0] < 3 * weights.total_bytes
    publisher.close()
    assert before - torch.cuda.mem_get_info()[0] < weights.total_bytes

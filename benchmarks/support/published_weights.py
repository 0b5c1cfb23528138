"""Figures of weight sync: how long engines pause, and how fast weights are published."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.config.sections.model import ModelConfig
from penstock.errors import RequestAborted
from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.weights.digest import tensor_digests
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import WeightSite
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of
from penstock.weights.synchronizer import WeightSynchronizer


@dataclass(frozen=True)
class Case:
    """A model, and how it is served while its weights change."""

    config: dict[str, Any]
    device: str
    dtype: torch.dtype
    requests: int
    updates: int


def cpu_case(*, quick: bool) -> Case:
    """About 13 million weights in float32."""
    config = {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4 if quick else 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return Case(config, "cpu", torch.float32, requests=4, updates=5 if quick else 15)


def gpu_case(*, quick: bool) -> Case:
    """The shape of Qwen3-0.6B in bf16."""
    config = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    return Case(config, "cuda", torch.bfloat16, requests=64, updates=5 if quick else 15)


def random_model(case: Case) -> Any:
    """A model with random weights; it has no token that ends a response."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    common = {"max_position_embeddings": 4096, "tie_word_embeddings": True, "pad_token_id": 0}
    config = Qwen3Config(**case.config, **common, eos_token_id=None, bos_token_id=None)
    with torch.device(case.device):
        model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():  # not the rotary frequencies, which stay in float32 as in a loaded model
        parameter.data = parameter.data.to(case.dtype)
    return model.eval()


def pause_figures(case: Case) -> dict[str, Any]:
    """Pauses of an engine in a thread and of one in a process, each while it generates."""
    model = random_model(case)
    figures: dict[str, Any] = {"weights_mb": PolicyWeights.of(model).total_bytes / 1e6}
    options = {"max_num_seqs": case.requests, "max_model_len": 1024}

    async def measure() -> None:
        engine = EmbeddedEngine(copy.deepcopy(model), **options)
        figures.update(await _pauses("thread", case, model, engine, [engine.site]))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            settings = ModelConfig(path=folder, dtype=str(case.dtype).removeprefix("torch."))
            process = EngineProcess(settings, case.device, **options)
            remote = await asyncio.to_thread(ProcessEngine, process, None)
            try:
                figures.update(await _pauses("process", case, model, remote, [remote.site], close=False))
                if case.device != "cpu":  # as between two GPUs, or where memory of a GPU cannot be shared
                    elsewhere = [replace(remote.site, device="cpu")]
                    figures.update(await _pauses("process_by_cpu", case, model, remote, elsewhere, close=False))
            finally:
                await remote.close()

    asyncio.run(measure())
    return figures


async def _pauses(
    name: str, case: Case, model: Any, engine: Any, sites: Sequence[WeightSite], *, close: bool = True
) -> dict[str, Any]:
    publisher = WeightPublisher()

    async def release(publication: Any, *, still_read: bool) -> None:
        publisher.release(publication, still_read=still_read)

    synchronizer = WeightSynchronizer([engine], release=release)
    reports, publishing = [], []
    async with _generating(engine, case.requests):
        for version in range(1, case.updates + 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0001)
            _wait_for(case.device)
            began = time.perf_counter()
            weights = PolicyWeights.of(model)
            publication = await asyncio.to_thread(publisher.publish, version, weights, sites)
            publishing.append(time.perf_counter() - began)
            reports.append(await synchronizer.publish(publication))
            await asyncio.sleep(0.1)  # it generates with them
    same = await engine.weight_digests() == tensor_digests(model.named_parameters())
    publisher.close()
    if close:
        await engine.close()
    measured = slice(2, None)  # the first ones allocate memory and try the ways there are
    return {
        f"pause_ms_{name}": 1e3 * statistics.median(report.pause_seconds for report in reports[measured]),
        f"pause_ms_{name}_max": 1e3 * max(report.pause_seconds for report in reports[measured]),
        f"prepare_ms_{name}": 1e3 * statistics.median(report.prepare_seconds for report in reports[measured]),
        f"publish_ms_{name}": 1e3 * statistics.median(publishing[measured]),
        f"transport_{name}": reports[-1].transports[engine.name].value,
        f"same_weights_{name}": same,
    }


@contextlib.asynccontextmanager
async def _generating(engine: Any, requests: int) -> AsyncIterator[None]:
    """Requests that are always running."""
    sampling = SamplingParams(max_new_tokens=900)

    async def generate(row: int) -> None:
        with contextlib.suppress(RequestAborted):
            for turn in range(1_000_000):
                await engine.generate(GenerationRequest(f"r{row}-{turn}", (3, 4, 5, 6), sampling, seed=row))

    tasks = [asyncio.create_task(generate(row)) for row in range(requests)]
    await asyncio.sleep(1.0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def publish_figures(*, quick: bool) -> dict[str, float]:
    """Publishing into shared memory against a plain copy of the same bytes, both into memory in use; interleaved."""
    matrices = [(f"w{i}", torch.randn(1024, 1024)) for i in range(16 if quick else 64)]
    weights, publisher = PolicyWeights.given(matrices), WeightPublisher()
    elsewhere = [replace(site_of(), process=1)]
    source = torch.cat([tensor.flatten() for _, tensor in matrices])
    target = torch.empty_like(source)
    plain, published = [], []
    for version in range(5 if quick else 15):
        began = time.perf_counter()
        target.copy_(source)
        plain.append(time.perf_counter() - began)
        began = time.perf_counter()
        publication = publisher.publish(version, weights, elsewhere)
        published.append(time.perf_counter() - began)
        publisher.release(publication)
    publisher.close()
    size = weights.total_bytes
    return {
        "publish_gb_s": size / statistics.median(published[1:]) / 1e9,
        "memcpy_gb_s": size / statistics.median(plain[1:]) / 1e9,
        "publish_over_memcpy": statistics.median(plain[1:]) / statistics.median(published[1:]),
    }


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

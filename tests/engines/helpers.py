"""What the engine tests share: small engines and requests, reference log-probs, and a gate inside the decode loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from penstock.rollout.engines.base import GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import WeightPublication
from penstock.weights.publisher import WeightPublisher
from tests.support.tiny_models import tiny_model

FAMILIES = ("qwen3", "llama", "qwen3_moe")


@contextlib.asynccontextmanager
async def running_engine(model: Any = None, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    """An engine that is closed at the end."""
    engine = EmbeddedEngine(model or tiny_model(), **{"max_num_seqs": 4, "max_model_len": 64, **options})
    try:
        yield engine
    finally:
        await engine.close()


def request(
    request_id: str = "r", prompt: Sequence[int] = (3, 4, 5), new: int = 8, seed: int = 0, **sampling: Any
) -> GenerationRequest:
    """A request with the settings that matter to a test."""
    params = SamplingParams(max_new_tokens=new, **sampling)
    return GenerationRequest(request_id, tuple(prompt), params, seed=seed)


def mixed_requests(count: int, **sampling: Any) -> list[GenerationRequest]:
    """Requests of different prompts, prompt lengths and response lengths, so that rows come and go."""
    return [
        request(f"m{i}", [3 + (7 * i + j) % 90 for j in range(1 + 5 * i % 17)], new=3 + 11 * i % 23, seed=i, **sampling)
        for i in range(count)
    ]


async def generate_all(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """All at once, results in order."""
    return list(await asyncio.gather(*map(engine.generate, requests)))


@torch.no_grad()
def reference_logprobs(
    model: Any, asked: GenerationRequest, result: GenerationResult, temperature: float = 1.0
) -> list[float]:
    """Log-probs of the response under one forward of the Hugging Face model over prompt and response."""
    ids = torch.tensor([asked.prompt_ids + result.token_ids])
    logprobs_TV = (model(ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
    first = len(asked.prompt_ids) - 1
    return [float(logprobs_TV[first + i, token]) for i, token in enumerate(result.token_ids)]


def with_norms_of_its_own(model: Any, seed: int) -> Any:
    """The model with weights of norms that differ from 1, and from other seeds'."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


_publishers = [WeightPublisher()]
"""The one that publishes."""


def published(weights: Any, version: int, *receivers: Any) -> WeightPublication:
    """Weights, a model's or others, as a trainer publishes them; without receivers, for this process."""
    given = weights if isinstance(weights, PolicyWeights) else PolicyWeights.of(weights)
    return _publishers[-1].publish(version, given, [receiver.site for receiver in receivers])


def end_publications() -> None:
    """Free what was published."""
    _publishers.pop().close()
    _publishers.append(WeightPublisher())


class Gate:
    """Stops the engine's thread inside its `step`-th decode step, until `open`; a test then knows where it stands.

    Counts calls of the input embedding with one token per row, so prompts must be longer than two tokens.
    """

    def __init__(self, model: Any, step: int) -> None:
        self.reached = asyncio.Event()
        self._opened = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._left = step
        model.get_input_embeddings().register_forward_pre_hook(self._hook)

    def _hook(self, _: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        if args[0].dim() == 2 and args[0].shape[1] > 1:
            return
        self._left -= 1
        if self._left == 0:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._opened.wait(60), "nobody opened the gate"

    def open(self) -> None:
        """Let the thread go on."""
        self._opened.set()


async def pause_within(engine: EmbeddedEngine, gate: Gate) -> None:
    """Pause the engine at the end of the step that the gate holds."""
    await gate.reached.wait()
    pausing = asyncio.ensure_future(engine.pause())
    await asyncio.sleep(0)  # the pause is now posted, and the thread still inside the step
    gate.open()
    await pausing

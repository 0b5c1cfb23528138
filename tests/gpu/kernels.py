"""Where the engine's kernels can be tested: compiled on a GPU, or on a CPU by Triton's interpreter.

The same tests run in both places. The interpreter is a thousand times slower, so they are small.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from penstock.rollout.engines.embedded import EmbeddedEngine
from tests.engines.helpers import running_engine
from tests.support.tiny_models import tiny_model

ON_GPU = torch.cuda.is_available()
INTERPRETED = (
    not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

needs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED),
    reason="needs a CUDA GPU, or Triton and TRITON_INTERPRET=1 in the environment; neither is here",
)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU, and torch sees none")


def small_model(family: str = "qwen3", **options: Any) -> Any:
    """A model on the device, of one layer where every operation is interpreted."""
    return tiny_model(family, **{"layers": 2 if ON_GPU else 1, **options}).to(DEVICE)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what an engine's counters show; a captured step has no place to hang an event on."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def kernel_engine(model: Any = None, **options: Any) -> AsyncIterator[EmbeddedEngine]:
    """An engine that decodes by kernels: with CUDA graphs on a GPU, interpreted on a CPU."""
    decoding = "auto" if ON_GPU else "kernels"
    async with running_engine(model or small_model(), **{"max_num_seqs": 3, "decoding": decoding, **options}) as engine:
        yield engine

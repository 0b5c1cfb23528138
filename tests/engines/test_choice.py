"""Which way of decoding an engine takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import SetupError
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.embedded.device import support
from penstock.rollout.engines.embedded.scheduler import Scheduler
from tests.engines.helpers import running_engine
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing is interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


async def test_a_cpu_decodes_plainly() -> None:
    async with running_engine() as engine:
        assert type(engine._scheduler) is Scheduler


@pytest.mark.parametrize(
    ("family", "decoding", "message"),
    [
        ("qwen3", "fast", "'auto', 'plain' or 'kernels', not 'fast'"),
        ("qwen3", "kernels", "not on a CUDA device"),
        ("qwen3_moe", "kernels", "not one of the plain Llama-like architectures"),
    ],
)
def test_what_does_not_work_is_refused_by_name(family: str, decoding: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        EmbeddedEngine(tiny_model(family), max_num_seqs=1, max_model_len=32, decoding=decoding)


def test_models_that_the_kernels_do_not_know_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as if the CPU were a device of theirs
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: object())

    def reason(change: Any = lambda model: None, model: Any = None) -> str | None:
        model = model or tiny_model()
        change(model)
        return support.why_not(model, 32)

    assert reason() is None
    assert "float64" in (reason(model=tiny_model().double()) or "")
    assert "head has a bias" in (reason(lambda model: setattr(model.lm_head, "bias", torch.nn.Parameter())) or "")
    assert "SiLU" in (reason(lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.GELU())) or "")
    assert "after its head" in (reason(lambda model: setattr(model.config, "logit_scale", 0.5)) or "")


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    assert support.why_not(tiny_model(), 32) == support.NO_TRITON


async def test_the_plain_way_can_be_asked_for() -> None:
    async with running_engine(decoding="plain") as engine:
        assert type(engine._scheduler) is Scheduler

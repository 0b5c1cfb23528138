"""An engine that is replaced has let go of its model before the next one is loaded."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from penstock.errors import EngineError
from penstock.rollout.engines.base import GenerationEngine
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.fleet import EngineFleet
from tests.engines.helpers import request
from tests.support.tiny_models import tiny_model


def engine_of(model: Any) -> tuple[EmbeddedEngine, list[weakref.ref[torch.Tensor]]]:
    """An engine that alone holds the model, and the model's weights as others may see whether they are there."""
    return EmbeddedEngine(model, max_num_seqs=2, max_model_len=32), [weakref.ref(one) for one in model.parameters()]


def break_weights(model: Any) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))


@pytest.mark.parametrize("has_failed", [True, False])
async def test_the_old_model_is_gone_when_the_new_one_is_built(has_failed: bool) -> None:
    model = tiny_model()
    engine, weights = engine_of(model)
    if has_failed:
        break_weights(model)
    del model
    present: list[int] = []

    def build(name: str) -> GenerationEngine:
        present.append(sum(weight() is not None for weight in weights))
        return EmbeddedEngine(tiny_model(), max_num_seqs=2, max_model_len=32)

    fleet = EngineFleet([engine], build=build, replacements=1)
    with fleet.kept():
        if has_failed:
            with pytest.raises(EngineError, match="has failed"):
                await engine.generate(request())
        else:
            fleet.rank("embedded").died(EngineError("gone"))
        await fleet.dead.get()
        await fleet.replace("embedded")
    assert present == [0]
    assert fleet.rank("embedded").stats().slots == 2
    await fleet.close()

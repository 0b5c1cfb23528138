"""Rows of a checkpoint that do not say which tokens truncated sampling kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.controller.bookkeeping.snapshot import ControllerSnapshot
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import INPUT_IDS, KEPT_FIELDS
from penstock.errors import SetupError
from tests.support.scripted_run import ScriptedRun, scripted_config


def built(**sampling: Any) -> ScriptedRun:
    run = ScriptedRun(scripted_config(rollout={"sampling": sampling}))
    run._build()
    return run


async def snapshot(*columns: str) -> ControllerSnapshot:
    """With one ready row that has these columns."""
    tokens = JaggedColumn(torch.zeros(3, dtype=torch.int32), torch.tensor([0, 3]))
    rows = SampleBatch(("group_g0",), dict.fromkeys(columns, tokens))
    return replace(await built().controller.snapshot(), rows=rows)


async def test_they_are_refused_where_sampling_is_truncated_and_only_there() -> None:
    new, old = await snapshot(INPUT_IDS, *KEPT_FIELDS), await snapshot(INPUT_IDS)
    await built(top_k=4).controller.restore(new)
    await built().controller.restore(old)
    for sampling in ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(SetupError, match="do not record which tokens truncated sampling kept"):
            await built(**sampling).controller.restore(old)

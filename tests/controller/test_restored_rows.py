"""Rows of a checkpoint that do not say which tokens truncated sampling kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.controller.bookkeeping.snapshot import SavedController
from penstock.data_plane.archive import save_rows
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import INPUT_IDS, KEPT_FIELDS
from penstock.errors import SetupError
from tests.support.scripted_run import ScriptedRun, scripted_config


def built(**sampling: Any) -> ScriptedRun:
    run = ScriptedRun(scripted_config(rollout={"sampling": sampling}))
    run._build()
    return run


async def saved(folder: Path, *columns: str) -> SavedController:
    """A checkpoint with one ready row that has these columns."""
    tokens = JaggedColumn(torch.zeros(3, dtype=torch.int32), torch.tensor([0, 3]))
    wide = JaggedColumn(tokens.values.long(), tokens.offsets_R1)
    os.mkdir(folder)
    save_rows(folder, SampleBatch(("group_g0",), {name: wide if name == INPUT_IDS else tokens for name in columns}))
    state = (await built().controller.snapshot()).state
    return SavedController(state, b"", folder)


async def test_they_are_refused_where_sampling_is_truncated_and_only_there(tmp_path: Path) -> None:
    new, old = await saved(tmp_path / "new", INPUT_IDS, *KEPT_FIELDS), await saved(tmp_path / "old", INPUT_IDS)
    await built(top_k=4).controller.restore(new)
    await built().controller.restore(old)
    for sampling in ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(SetupError, match="do not record which tokens truncated sampling kept"):
            await built(**sampling).controller.restore(old)

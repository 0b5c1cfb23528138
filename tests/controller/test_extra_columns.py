"""Columns of an environment's own in the controller: in its metrics, and in the ready groups of its snapshots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.controller.bookkeeping.snapshot import SavedController
from penstock.data_plane.archive import load_rows
from penstock.errors import SetupError
from penstock.rollout.environments.base import GenerationHandle, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.prompts import Prompt
from penstock.training.workers.scripted import ScriptedTrainer
from tests.controller.test_held_rows import CONFIG, snapshot_after_first_step
from tests.support.scripted_run import ScriptedEnvironment, ScriptedRun, scripted_config

HINTS = ExtraColumn("hints", "fixed", "int64", metric="sum")
BEST = ExtraColumn("best", "fixed", "float32", metric="max", optional=True)
PLACE = ExtraColumn("place", "per_token", "int64")


@dataclass
class Hinting(ScriptedEnvironment):
    """Gives as many hints as the prompt's number says; even prompts have a best score."""

    extra_columns: tuple[ExtraColumn, ...] = (HINTS, BEST, PLACE)

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        played, number = await super().run(prompt, handle), int(prompt.text)
        given: dict[str, Any] = {"hints": number, "place": list(range(played.row_length))}
        given |= {"best": number / 2} if number % 2 == 0 else {}
        names = {column.name for column in self.extra_columns}
        return replace(played, columns={name: value for name, value in given.items() if name in names})


async def test_numbers_are_combined_as_declared_over_the_samples_that_have_them() -> None:
    run = ScriptedRun(scripted_config(), environment=Hinting(8))
    await run.run()
    assert [step["rollout/scripted/hints"] for step in run.steps] == [2 * (0 + 1 + 2 + 3), 2 * (4 + 5 + 6 + 7)]
    assert [step["rollout/scripted/best"] for step in run.steps] == [1.0, 3.0]


async def test_ready_groups_are_restored_with_them(tmp_path: Path) -> None:
    snapshot, ready = await snapshot_after_first_step(ScriptedRun(scripted_config(**CONFIG), environment=Hinting(12)))
    snapshot.write(tmp_path)
    assert load_rows(tmp_path / "rows").columns.keys() >= {"hints", "best", "place"}
    trainer = ScriptedTrainer(version=1)
    again = ScriptedRun(scripted_config(**CONFIG), environment=Hinting(12), trainer=trainer)
    again._build()
    await again.controller.restore(SavedController.read(tmp_path))
    assert await again.controller.run() == "data_exhausted"
    assert set(ready) <= {f"{group}_g{index}" for group in again.trained_groups for index in range(2)}
    assert sum(step["rollout/scripted/hints"] for step in again.steps) == 2 * sum(range(2, 12))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            (HINTS, PLACE),
            (HINTS,),
            "extra_columns are hints, but the ready groups of the checkpoint have hints, place",
        ),
        (
            (HINTS,),
            (ExtraColumn("hints", "fixed", "int32"),),
            "its column 'hints' is fixed int32, but in the ready groups of the checkpoint it is fixed int64",
        ),
        (
            (PLACE, HINTS),
            (ExtraColumn("place", "per_token", "int64", shape=(2,)), HINTS),
            r"its column 'place' is per-token int64 of shape \[2\], but in the ready .* it is per-token int64\.",
        ),
        ((), (HINTS,), "its extra_columns are hints, but the ready groups of the checkpoint have none"),
    ],
)
async def test_ready_groups_with_other_columns_are_refused(
    tmp_path: Path, before: tuple[ExtraColumn, ...], after: tuple[ExtraColumn, ...], message: str
) -> None:
    config = scripted_config(**CONFIG)
    snapshot, _ = await snapshot_after_first_step(ScriptedRun(config, environment=Hinting(12, extra_columns=before)))
    snapshot.write(tmp_path)
    again = ScriptedRun(config, environment=Hinting(12, extra_columns=after), trainer=ScriptedTrainer(version=1))
    again._build()
    with pytest.raises(SetupError, match=message):
        await again.controller.restore(SavedController.read(tmp_path))

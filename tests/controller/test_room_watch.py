"""A data plane too small for a step ends the run at once, with the numbers; one that is large enough never does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.controller.pumps import room_watch
from penstock.data_plane import fields
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneFull
from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.training.interface import ChunkResult, StepResult
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config

LONG = 100.0
"""Seconds; less than a put waits for room."""
STEP = 4
"""Groups of a step."""
TOKENS = 400
GROUP = 22_000
"""About the bytes of a group of two such responses."""


def long_responses(request: GenerationRequest) -> ScriptedResponse:
    return ScriptedResponse(seconds=0.0, token_ids=(1,) * TOKENS)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_watch, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def opened() -> Iterator[list[ShmOwner]]:
    planes: list[ShmOwner] = []
    yield planes
    for plane in planes:
        plane.close()


def run_with(opened: list[ShmOwner], groups: float, **sections: Any) -> ScriptedRun:
    """A run whose data plane holds about that many groups."""
    opened.append(ShmOwner(int(groups * GROUP)))
    return ScriptedRun(scripted_config(**sections), prompts=16, data_plane=opened[-1], script=long_responses)


async def test_a_step_that_does_not_fit_ends_the_run_with_what_it_needs(opened: list[ShmOwner]) -> None:
    run = run_with(opened, 2.5)
    with pytest.raises(DataPlaneFull) as caught:
        await run.run(LONG)
    said = str(caught.value)
    assert "2 of the 4 groups of step 1 and 0 that wait for later steps" in said
    assert "Raise data_plane.capacity_gb to 8." in said, said
    assert "e-05 or more" in said
    assert not run.names("prompt_dropped"), "no prompt is blamed"
    assert not run.names("rollout_retried")
    assert run.rows_left == 0


@pytest.mark.parametrize("policy", [{"policy": "on_policy"}, {"policy": "windowed", "max_staleness": 3}])
@pytest.mark.parametrize("groups", [4.5, 6.5])
async def test_puts_that_only_have_to_wait_end_nothing(
    opened: list[ShmOwner], groups: float, policy: dict[str, Any]
) -> None:
    """There is room for a step, and not for all that is generated ahead of it."""
    run = run_with(opened, groups, staleness=policy)
    assert await run.run(LONG) == "data_exhausted"
    assert len(run.steps) == 4
    assert not run.names("rollout_retried")


async def test_groups_of_later_steps_may_be_in_the_way(opened: list[ShmOwner]) -> None:
    """The one group that the step lacks is still being generated, and would find no room either."""

    def script(request: GenerationRequest) -> ScriptedResponse:
        is_slow = request.request_id.startswith("group00000003_")
        return ScriptedResponse(seconds=10 * LONG if is_slow else 0.0, token_ids=(1,) * TOKENS)

    run = run_with(opened, 5.5, staleness={"policy": "in_order", "lookahead": 1})
    run.script = script
    with pytest.raises(DataPlaneFull, match=r"[1-3] of the 4 groups of step 1 and [2-4] that wait for later steps"):
        await run.run(LONG)


class WaitsForAll(ScriptedTrainer):
    """Finishes no step before more groups wait for room than a step has."""

    plane: ShmOwner

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        while self.plane.store.waiting_puts <= STEP:  # noqa: ASYNC110 - it is looked at
            await asyncio.sleep(0.01)
        return await super().finish_train_step(step_id, last=last)


async def test_a_drain_does_not_wait_for_groups_that_wait_for_room(opened: list[ShmOwner]) -> None:
    """The next step's groups fill the data plane, and weight sync waits for those that are left outside."""
    run = run_with(opened, 4.5, staleness={"policy": "windowed", "max_staleness": 3}, weight_sync={"mode": "drain"})
    run.trainer = trainer = WaitsForAll()
    trainer.plane = opened[-1]
    with pytest.raises(DataPlaneFull, match=r"data_plane\.capacity_gb"):
        await run.run(LONG)
    assert len(run.trainer.finished) == 1, "the step that was finished counts"


class AddsColumns(ScriptedTrainer):
    """Writes a column of its own to the rows it trains."""

    def __init__(self, plane: ShmOwner, values: int) -> None:
        super().__init__()
        self._plane, self._values = plane, values

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        rows = [torch.zeros(self._values, dtype=torch.float64) for _ in meta.sample_ids]
        columns = {fields.REFERENCE_LOGPROBS: JaggedColumn.from_rows(rows)}
        await asyncio.to_thread(self._plane.put_samples, meta.sample_ids, columns, meta.partition_id)
        return await super().train_microbatch(step_id, meta)


@pytest.mark.parametrize(("values", "fits"), [(100, True), (2000, False)])
async def test_columns_that_the_trainer_adds_do_not_wait_for_their_own_rows(
    opened: list[ShmOwner], values: int, fits: bool
) -> None:
    run = run_with(opened, 4.5, training={"train_attempts": 1, "min_groups_per_chunk": STEP})
    run.trainer = AddsColumns(opened[-1], values)
    if fits:
        assert await run.run(LONG) == "data_exhausted"
        return
    with pytest.raises(DataPlaneFull, match=r"columns for rows that are there need \d.*data_plane\.capacity_gb"):
        await run.run(LONG)

"""The RolloutManager: rows of a group, all of them or none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.errors import DataPlaneError, EnvironmentFailure
from penstock.rollout.engines.base import FinishReason, GenerationRequest, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments.base import GenerationHandle, Segment, Trajectory
from penstock.rollout.manager import PARTITION, RolloutManager, RolloutSettings
from penstock.rollout.prompts import Prompt, PromptVisit
from tests.support.scripted_run import NumberTokenizer, ScriptedEnvironment

VISIT = PromptVisit(epoch=0, prompt=Prompt("5", "5"))


SCHEMA = fields.schema(*fields.ROLLOUT_FIELDS, fields.ADVANTAGE)


def manager(
    environment: Any, script: Any, plane: MemoryDataPlane, group_size: int = 3, schema: Any = SCHEMA
) -> RolloutManager:
    """Registers the rows' `schema`, if there is one."""
    if schema is not None:
        plane.register_partition(PARTITION, schema)
    settings = RolloutSettings(group_size, SamplingParams(max_new_tokens=8), seed=0, generation_timeout_seconds=5)
    return RolloutManager(ScriptedEngine(script), environment, NumberTokenizer(), plane, settings)


def answer(request: GenerationRequest) -> ScriptedResponse:
    return ScriptedResponse(0.0, token_ids=(11, 12, 1), finish_reason=FinishReason.LENGTH)


async def test_a_group_becomes_rows_with_masks_logprobs_and_versions() -> None:
    plane = MemoryDataPlane()
    pushed = await manager(ScriptedEnvironment(1, lambda p: 0.5), answer, plane).generate_and_push(VISIT, "grp", 0)
    assert pushed.meta.sample_ids == ("grp_g0", "grp_g1", "grp_g2")
    assert pushed.meta.sequence_lengths == (4, 4, 4)
    batch = plane.get_samples(pushed.meta, fields.ROLLOUT_FIELDS)
    assert batch.jagged(fields.INPUT_IDS).row(0).tolist() == [5, 11, 12, 1]
    assert batch.jagged(fields.TOKEN_MASK).row(1).tolist() == [0, 1, 1, 1]
    assert batch.jagged(fields.GENERATION_LOGPROBS).row(1).tolist() == [0, -1, -1, -1]
    assert batch.jagged(fields.TOKEN_VERSIONS).row(2).tolist() == [-1, 0, 0, 0]
    assert batch.tensor(fields.REWARD).tolist() == [0.5] * 3
    assert batch.tensor(fields.TRUNCATED).tolist() == [True] * 3
    assert batch.objects(fields.RESPONSE_TEXT).items[0] == "11 12 1"


class ToolEnvironment(ScriptedEnvironment):
    """Two turns with a tool's words between them."""

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        asked = handle.encode_prompt(prompt.text)
        first = await handle.generate(asked)
        tool = (77, 78)
        second = await handle.generate((*asked, *first.token_ids, *tool))
        segments = (Segment(asked), Segment(first.token_ids, first), Segment(tool), Segment(second.token_ids, second))
        return Trajectory(segments, 1.0, "")


async def test_tokens_of_the_environment_are_in_the_row_but_not_trained() -> None:
    plane = MemoryDataPlane()
    seeds: set[int] = set()

    def script(request: GenerationRequest) -> ScriptedResponse:
        seeds.add(request.seed)
        return ScriptedResponse(0.0, token_ids=(20 + len(request.prompt_ids),))

    pushed = await manager(ToolEnvironment(1), script, plane, group_size=2).generate_and_push(VISIT, "grp", 0)
    batch = plane.get_samples(pushed.meta, fields.ROLLOUT_FIELDS)
    assert batch.jagged(fields.INPUT_IDS).row(0).tolist() == [5, 21, 77, 78, 24]
    assert batch.jagged(fields.TOKEN_MASK).row(0).tolist() == [0, 1, 0, 0, 1]
    assert batch.tensor(fields.RESPONSE_LENGTH).tolist() == [2, 2]
    assert [tags[fields.VALID_TOKENS] for tags in pushed.meta.tags] == [2, 2]
    assert len(seeds) == 4


async def test_one_failing_sample_fails_the_group_and_leaves_no_rows() -> None:
    plane = MemoryDataPlane()
    calls = iter([1.0, float("nan"), 1.0])
    with pytest.raises(EnvironmentFailure):
        await manager(ScriptedEnvironment(1, lambda p: next(calls)), answer, plane).generate_and_push(VISIT, "grp", 0)
    assert plane.count_samples(PARTITION) == 0


async def test_a_put_that_fails_half_way_leaves_no_rows() -> None:
    class Torn(MemoryDataPlane):
        async def put_samples_async(self, sample_ids: Any, columns: Any, partition_id: str, tags: Any = None) -> None:
            self.put_samples(sample_ids, columns, partition_id, tags)
            raise DataPlaneError("disk full")

    plane = Torn()
    with pytest.raises(DataPlaneError, match="disk full"):
        await manager(ScriptedEnvironment(1), answer, plane).generate_and_push(VISIT, "grp", 0)
    assert plane.count_samples(PARTITION) == 0


async def test_cancelling_a_group_aborts_its_requests() -> None:
    plane = MemoryDataPlane()
    made = manager(ScriptedEnvironment(1), lambda request: ScriptedResponse(60.0), plane)
    task = asyncio.create_task(made.generate_and_push(VISIT, "grp", 0))
    while made._engine.stats().running < 3:  # noqa: ASYNC110 - the engine is looked at, not told to signal
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made._engine.stats().running == 0


async def test_a_retried_prompt_gets_the_same_seeds_under_another_group_id() -> None:
    seen: dict[str, list[int]] = {}

    def script(request: GenerationRequest) -> ScriptedResponse:
        seen.setdefault(request.group_id, []).append(request.seed)
        return answer(request)

    made = manager(ScriptedEnvironment(1), script, MemoryDataPlane())
    await made.generate_and_push(VISIT, "one", 0)
    await made.generate_and_push(VISIT, "two", 0)
    assert seen["one"] == seen["two"]
    assert len(set(seen["one"])) == 3

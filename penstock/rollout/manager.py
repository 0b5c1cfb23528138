"""The RolloutManager: from a prompt to a group of rows in the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.engines.base import GenerationEngine, SamplingParams
from penstock.rollout.environments.base import Environment, Trajectory
from penstock.rollout.handle import SampleHandle, Tokenizer
from penstock.rollout.prompt_room import PromptRoom
from penstock.rollout.prompts import Prompt, PromptVisit, derive_seed
from penstock.rollout.rows import group_columns

PARTITION = "rollouts"


@dataclass(frozen=True)
class PushedGroup:
    """A group whose rows are in the data plane: all that the controller learns of it."""

    meta: KVBatchMeta
    end_version: int
    """The newest weight version that produced one of its tokens."""
    prompt_cut: bool = False
    """Whether the prompt was too long, and only its last tokens were kept."""


class GroupSource(Protocol):
    """Where the controller gets its groups from."""

    async def generate_and_push(self, visit: PromptVisit, group_id: str, start_version: int) -> PushedGroup:
        """Bring about one group for the visit. Rows are in the data plane if and only if this returns."""


@dataclass(frozen=True)
class RolloutSettings:
    """What every group of a run has in common."""

    group_size: int
    sampling: SamplingParams
    seed: int
    generation_timeout_seconds: float
    room: PromptRoom | None = None
    """What becomes of prompts that are too long."""


class RolloutManager(GroupSource):
    """Generates a group's samples side by side, scores them, and writes their rows; all of them or none."""

    def __init__(
        self,
        engine: GenerationEngine,
        environment: Environment,
        tokenizer: Tokenizer,
        data_plane: DataPlaneClient,
        settings: RolloutSettings,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._data_plane = data_plane
        self._settings = settings

    async def generate_and_push(self, visit: PromptVisit, group_id: str, start_version: int) -> PushedGroup:
        """Generate, score and write one group. Rows are in the data plane if and only if this returns."""
        samples = await self._sample(visit, group_id)
        trajectories = [trajectory for trajectory, _ in samples]
        columns = group_columns(trajectories)
        sample_ids = [fields.sample_id(group_id, i) for i in range(len(trajectories))]
        try:
            await self._data_plane.put_samples_async(sample_ids, columns, PARTITION)
        except BaseException:
            await self._data_plane.clear_samples_async(sample_ids, PARTITION)
            raise
        pushed = _describe(sample_ids, columns[fields.INPUT_IDS], trajectories, start_version, self._environment.name)
        return replace(pushed, prompt_cut=any(cut for _, cut in samples))

    async def _sample(self, visit: PromptVisit, group_id: str) -> list[tuple[Trajectory, bool]]:
        """Trajectories, each with whether its prompt was cut."""
        settings = self._settings
        # Seeds derive from the prompt, never from the group id: a retried prompt gets the same responses.
        seeds = [
            derive_seed(settings.seed, visit.epoch, visit.prompt.prompt_id, index)
            for index in range(settings.group_size)
        ]
        first: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as samples:
                tasks = [
                    samples.create_task(self._run_one(visit.prompt, group_id, index, seed))
                    for index, seed in enumerate(seeds)
                ]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
        if first is not None:  # raised out here, where it keeps the causes and the context that it has
            raise first
        return [task.result() for task in tasks]

    async def _run_one(self, prompt: Prompt, group_id: str, index: int, seed: int) -> tuple[Trajectory, bool]:
        handle = SampleHandle(
            engine=self._engine,
            tokenizer=self._tokenizer,
            sampling=self._settings.sampling,
            group_id=group_id,
            sample=fields.sample_id(group_id, index),
            seed=seed,
            timeout_seconds=self._settings.generation_timeout_seconds,
            room=self._settings.room,
        )
        trajectory = await self._environment.run(prompt, handle)
        return trajectory, handle.prompt_cut


def _describe(
    sample_ids: Sequence[str],
    input_ids: object,
    trajectories: Sequence[Trajectory],
    start_version: int,
    environment: str,
) -> PushedGroup:
    assert isinstance(input_ids, JaggedColumn)
    spans = [_version_span(trajectory, start_version) for trajectory in trajectories]
    meta = KVBatchMeta(
        partition_id=PARTITION,
        sample_ids=tuple(sample_ids),
        fields=frozenset(fields.ROLLOUT_FIELDS),
        sequence_lengths=tuple(input_ids.lengths_R.tolist()),
        tags=tuple(
            {
                "environment": environment,
                "response_length": trajectory.length,
                "first_version": low,
                "last_version": high,
            }
            for trajectory, (low, high) in zip(trajectories, spans, strict=True)
        ),
    )
    return PushedGroup(meta, max(high for _, high in spans))


def _version_span(trajectory: Trajectory, start_version: int) -> tuple[int, int]:
    versions = [v for s in trajectory.segments if s.generation is not None for v in s.generation.token_versions]
    return (min(versions), max(versions)) if versions else (start_version, start_version)

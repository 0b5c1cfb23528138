"""The RolloutManager: from a prompt to a group of rows in the data plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.engines.base import SamplingParams
from penstock.rollout.environments.base import Environment, GroupEnvironment, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn, aggregations, declared_columns
from penstock.rollout.environments.rewards.scores import failures_about
from penstock.rollout.extra_values import stacked, with_columns
from penstock.rollout.handle import Generator, SampleHandle, Tokenizer
from penstock.rollout.prompt_room import PromptRoom
from penstock.rollout.prompts import Prompt, PromptVisit, derive_seed
from penstock.rollout.sample_columns import group_columns, valid_tokens
from penstock.runtime.together import together
from penstock.runtime.wire.crossing import crosses

PARTITION = "rollouts"


@crosses
@dataclass(frozen=True)
class PushedGroup:
    """A group whose rows are in the data plane: everything the controller learns about it."""

    meta: KVBatchMeta
    end_version: int
    """The newest weight version that produced one of its tokens."""
    prompt_cut: bool = False
    """Whether the prompt was too long, and only its last tokens were kept."""


class GroupSource(Protocol):
    """Where the controller gets its groups from."""

    async def generate_and_push(self, visit: PromptVisit, group_id: str, start_version: int) -> PushedGroup:
        """Produce one group for the visit. Rows are in the data plane if and only if this returns."""


class GroupWriter(Protocol):
    """Takes every group whose rows are in the data plane, before the controller learns of it."""

    async def write(self, visit: PromptVisit, start_version: int, pushed: PushedGroup, rows: SampleBatch) -> None:
        """Take a group; if this raises, the group does not count, and its rows are cleared."""


@crosses
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
    """Generates a group's samples concurrently, scores them, and writes their rows; all of them or none."""

    def __init__(
        self,
        engine: Generator,
        environment: Environment,
        tokenizer: Tokenizer,
        data_plane: DataPlaneClient,
        settings: RolloutSettings,
        writer: GroupWriter | None = None,
    ) -> None:
        """`writer` records groups, if they are to be recorded."""
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._data_plane = data_plane
        self._settings = settings
        self._writer = writer
        self._extra = declared_columns(environment)

    async def generate_and_push(self, visit: PromptVisit, group_id: str, start_version: int) -> PushedGroup:
        """Generate, score and write one group. Rows are in the data plane if and only if this returns."""
        trajectories, is_cut = await self._sample(visit, group_id)
        columns = self._columns(trajectories)
        sample_ids = [fields.sample_id(group_id, i) for i in range(len(trajectories))]
        pushed = _describe(sample_ids, columns, trajectories, start_version, self._environment.name, self._extra)
        try:
            await self._data_plane.put_samples_async(sample_ids, columns, PARTITION)
            if self._writer is not None:
                await self._writer.write(visit, start_version, pushed, SampleBatch(tuple(sample_ids), columns))
        except BaseException:
            await self._data_plane.clear_samples_async(sample_ids, PARTITION)
            raise
        return replace(pushed, prompt_cut=is_cut)

    async def _sample(self, visit: PromptVisit, group_id: str) -> tuple[list[Trajectory], bool]:
        """Trajectories, and whether their prompt was cut."""
        settings = self._settings
        # Seeds derive from the prompt, never from the group id: a retried prompt gets the same responses.
        seeds = [
            derive_seed(settings.seed, visit.epoch, visit.prompt.prompt_id, index)
            for index in range(settings.group_size)
        ]
        handles = [self._handle(group_id, index, seed) for index, seed in enumerate(seeds)]
        if isinstance(self._environment, GroupEnvironment):
            trajectories = await self._environment.run_group(visit.prompt, handles)
            played = [self._with_columns(each, index, group_id) for index, each in enumerate(trajectories)]
        else:
            played = await together(*(self._run_one(visit.prompt, *each, group_id) for each in enumerate(handles)))
        return played, any(handle.prompt_cut for handle in handles)

    async def _run_one(self, prompt: Prompt, index: int, handle: SampleHandle, group_id: str) -> Trajectory:
        with failures_about(None, index):
            trajectory = await self._environment.run(prompt, handle)
        # At once: the environment may use the memory of its columns again for the next sample.
        return self._with_columns(trajectory, index, group_id)

    def _columns(self, trajectories: Sequence[Trajectory]) -> dict[str, Column]:
        columns = group_columns(trajectories)
        input_ids = columns[fields.INPUT_IDS]
        assert isinstance(input_ids, JaggedColumn)
        return columns | stacked(trajectories, self._extra, input_ids.offsets_R1)

    def _with_columns(self, trajectory: Trajectory, index: int, group_id: str) -> Trajectory:
        with failures_about(trajectory.response_text, index):
            return with_columns(trajectory, self._extra, self._environment.name, fields.sample_id(group_id, index))

    def _handle(self, group_id: str, index: int, seed: int) -> SampleHandle:
        return SampleHandle(
            engine=self._engine,
            tokenizer=self._tokenizer,
            sampling=self._settings.sampling,
            group_id=group_id,
            sample=fields.sample_id(group_id, index),
            seed=seed,
            timeout_seconds=self._settings.generation_timeout_seconds,
            room=self._settings.room,
        )


def _describe(
    sample_ids: Sequence[str],
    columns: Mapping[str, Column],
    trajectories: Sequence[Trajectory],
    start_version: int,
    environment: str,
    declared: Sequence[ExtraColumn],
) -> PushedGroup:
    input_ids = columns[fields.INPUT_IDS]
    assert isinstance(input_ids, JaggedColumn)
    spans = [_version_span(trajectory, start_version) for trajectory in trajectories]
    how = aggregations(declared)
    meta = KVBatchMeta(
        partition_id=PARTITION,
        sample_ids=tuple(sample_ids),
        fields=frozenset(columns),
        sequence_lengths=tuple(input_ids.lengths_R.tolist()),
        tags=tuple(
            {
                "environment": environment,
                "response_length": trajectory.length,
                fields.VALID_TOKENS: valid,
                "first_version": low,
                "last_version": high,
                **({"components": dict(trajectory.components)} if trajectory.components else {}),
                **({"metrics": dict(trajectory.metrics)} if trajectory.metrics else {}),
                **({"aggregations": how} if how else {}),
            }
            for trajectory, (low, high), valid in zip(trajectories, spans, valid_tokens(columns), strict=True)
        ),
    )
    return PushedGroup(meta, max(high for _, high in spans))


def _version_span(trajectory: Trajectory, start_version: int) -> tuple[int, int]:
    versions = [v for s in trajectory.segments if s.generation is not None for v in s.generation.token_versions]
    return (min(versions), max(versions)) if versions else (start_version, start_version)

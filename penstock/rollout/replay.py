"""Replaying: groups come from a recording, at the controller's own pace and under its own rules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.data_plane import fields
from penstock.data_plane.archive import load_rows
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import Column, JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import ConfigError, DataPlaneError, FailureKind, PenstockError, SetupError
from penstock.rollout.environments.base import Environment, GenerationHandle, Split, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.extra_values import problem_with_rows
from penstock.rollout.manager import PARTITION, GroupSource, PushedGroup
from penstock.rollout.prompts import Prompt, PromptStream, PromptVisit
from penstock.rollout.recorded import RecordedGroup, Recording, RecordingInfo
from penstock.rollout.sample_columns import valid_tokens


class ReplayFailure(PenstockError):
    """A recorded group is missing or damaged."""

    failure_kind = FailureKind.DATA


class ReplaySource(GroupSource):
    """Reads a visit's group and puts its rows under the controller's group id; nothing is generated or scored.

    Rows are those of the recording, bit for bit, except for weight versions: a version of the recording that this run's
    trainer has not reached when the group is dispatched is set back to the one it has, since no token can be newer than
    the weights that are trained on it.

    Example: tokens recorded with versions 0 and 3, dispatched at version 2, have versions 0 and 2.
    """

    def __init__(self, recording: Recording, data_plane: DataPlaneClient) -> None:
        self._recording = recording
        self._data_plane = data_plane

    async def generate_and_push(self, visit: PromptVisit, group_id: str, start_version: int) -> PushedGroup:
        """Put a recorded group into the data plane."""
        group, columns = await asyncio.to_thread(self._read, visit)
        columns[fields.TOKEN_VERSIONS] = _no_newer(columns[fields.TOKEN_VERSIONS], start_version)
        sample_ids = tuple(fields.sample_id(group_id, index) for index in range(len(group.sequence_lengths)))
        try:
            await self._data_plane.put_samples_async(sample_ids, columns, PARTITION)
        except BaseException:
            await self._data_plane.clear_samples_async(sample_ids, PARTITION)
            raise
        meta = KVBatchMeta(
            partition_id=PARTITION,
            sample_ids=sample_ids,
            fields=frozenset(columns),
            sequence_lengths=tuple(group.sequence_lengths),
            tags=tuple(_tags_no_newer(tags, start_version) for tags in group.tags),
        ).tag_rows(fields.VALID_TOKENS, valid_tokens(columns))
        return PushedGroup(meta, end_version=start_version)

    def _read(self, visit: PromptVisit) -> tuple[RecordedGroup, dict[str, Column]]:
        where = f"prompt {visit.key} of the recording in {str(self._recording.run_dir)!r}"
        found = self._recording.find(visit.epoch, visit.prompt.prompt_id)
        if found is None:
            raise ReplayFailure(f"{where} does not exist")
        group, folder = found
        try:
            columns = dict(load_rows(folder).columns)
        except DataPlaneError as error:
            # Not as a cause: a data plane's error is the machinery's fault elsewhere, and worth more attempts.
            raise ReplayFailure(f"{where}: {error}") from None
        if not columns.keys() & set(fields.KEPT_FIELDS):
            self._add_kept_fields(where, columns)
        _check_columns(where, group, columns, self._recording.info.columns)
        return group, columns

    def _add_kept_fields(self, where: str, columns: dict[str, Column]) -> None:
        """For rows recorded without what tokens were drawn from; it is known if that was the whole vocabulary."""
        settings, ids = self._recording.info.settings, columns.get(fields.INPUT_IDS)
        if _truncates(settings):
            raise ReplayFailure(
                f"{where}: its rows do not record which tokens truncated sampling kept, and log-probs cannot be "
                "computed without them; record them again with this version"
            )
        if isinstance(ids, JaggedColumn):
            columns[fields.KEPT_COUNTS] = JaggedColumn(torch.zeros_like(ids.values, dtype=torch.int32), ids.offsets_R1)
            nothing_R1 = torch.zeros_like(ids.offsets_R1)
            columns[fields.KEPT_IDS] = JaggedColumn(torch.empty(0, dtype=torch.int32), nothing_R1)


class RecordedStream(PromptStream):
    """The visits of a recording in the order in which they were dispatched, under the epochs they had there."""

    def __init__(self, groups: Sequence[RecordedGroup]) -> None:
        prompts = [Prompt(group.prompt_id, group.prompt) for group in groups]
        super().__init__(prompts, epochs=1, shuffle=False, seed=0)
        self._epoch_of = [group.epoch for group in groups]

    def __getitem__(self, position: int) -> PromptVisit:
        return replace(super().__getitem__(position), epoch=self._epoch_of[position])


class RecordedEnvironment(Environment):
    """The environment of a replay: rewards are recorded, so there is nothing to play and nothing to evaluate."""

    name = "recorded"

    def __init__(self, recording: Recording) -> None:
        self._prompts = [Prompt(group.prompt_id, group.prompt) for group in recording.groups]
        self.extra_columns = recording.info.columns

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts if split is Split.TRAIN else []

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        raise ReplayFailure(f"prompt {prompt.prompt_id} cannot be generated: rollouts come from rollout.replay_from")

    async def close(self) -> None:
        """There is nothing to end."""


def check_settings(recorded: RecordingInfo, settings: Mapping[str, Any], run_dir: str) -> None:
    """Raise `ConfigError` for each setting that the recording does not share."""
    problems = [
        f"{key}: is {value}, but the rollouts in {run_dir!r} were recorded with {recorded.settings.get(key)}; "
        "use the same"
        for key, value in settings.items()
        if recorded.settings.get(key) != value
    ]
    if problems:
        raise ConfigError(problems)


def check_model(recording: Recording, tokenizer: str, vocabulary: int, group_size: int) -> None:
    """Raise if token ids mean something else to this model than when recorded, or groups are incomplete."""
    where = str(recording.run_dir)
    largest = max(recording.groups, key=lambda group: group.largest_token)
    if largest.largest_token >= vocabulary:
        raise ConfigError(
            [
                f"model.path: the rollouts in {where!r} have token ids up to {largest.largest_token}, but this model's "
                f"vocabulary has {vocabulary}; use the model they were recorded with"
            ]
        )
    if recording.info.tokenizer != tokenizer:
        raise ConfigError(
            [f"model.path: the rollouts in {where!r} were recorded with another tokenizer; use a model that has it"]
        )
    torn = [group for group in recording.groups if not len(group.sequence_lengths) == len(group.tags) == group_size]
    if torn:
        raise SetupError(
            f"rollout.replay_from: prompt {torn[0].prompt_id} of epoch {torn[0].epoch} in {where!r} has "
            f"{len(torn[0].sequence_lengths)} samples, but rollout.group_size is {group_size}"
        )


def _check_columns(
    where: str, group: RecordedGroup, columns: Mapping[str, Column], extra: Sequence[ExtraColumn]
) -> None:
    wrong = {*fields.ROLLOUT_FIELDS, *(column.name for column in extra)} ^ columns.keys()
    if wrong:
        raise ReplayFailure(f"{where}: its rows have the wrong columns: {', '.join(sorted(wrong))}")
    ids = columns[fields.INPUT_IDS]
    if not isinstance(ids, JaggedColumn) or ids.lengths_R.tolist() != group.sequence_lengths:
        raise ReplayFailure(f"{where}: its rows do not have the recorded lengths")
    if int(ids.values.max()) != group.largest_token or int(ids.values.min()) < 0:
        raise ReplayFailure(f"{where}: its token ids differ from the recorded ones")
    if problem := problem_with_rows(columns, extra, group.sequence_lengths):
        raise ReplayFailure(f"{where}: {problem}")


def _truncates(settings: Mapping[str, Any]) -> bool:
    top_p, top_k, min_p = (settings.get(f"rollout.sampling.{name}") for name in ("top_p", "top_k", "min_p"))
    return (top_p is not None and top_p < 1) or bool(top_k) or bool(min_p)


def _no_newer(versions: Column, newest: int) -> Column:
    assert isinstance(versions, JaggedColumn)
    return JaggedColumn(versions.values.clamp(max=newest), versions.offsets_R1)


def _tags_no_newer(tags: Mapping[str, Any], newest: int) -> dict[str, Any]:
    return {**tags, **{name: min(int(tags[name]), newest) for name in ("first_version", "last_version")}}

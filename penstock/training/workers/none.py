"""`training.backend: none`: a trainer that trains nothing, for runs that only record rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import Column
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.interface import ChunkResult, Prepared, StepResult, Trainer
from penstock.training.step import StepMachine
from penstock.training.targets import needs_kl_sums
from penstock.weights.publication import WeightManifest, WeightPublication, WeightSite


@dataclass(frozen=True)
class NothingTrained:
    """The trainer's share of a checkpoint: none. The other files let a recording resume where it stopped."""

    bytes_to_come: int = 0

    def write(self, folder: Path) -> None:
        """There is nothing to write."""


class NoTrainer(Trainer):
    """Steps open, take their groups and close, and the weights never change: version 0 forever.

    There is no model here: the engines load theirs themselves, and nothing is published to them. Advantages are still
    computed, so metrics show rewards; no token counts as trained.
    """

    def __init__(self, data_plane: DataPlaneClient, algorithm: AlgorithmConfig) -> None:
        self._data_plane = data_plane
        self._algorithm = algorithm
        self._machine = StepMachine()

    async def begin_train_step(self, step_id: int) -> None:
        self._machine.begin(step_id)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        with self._machine.microbatch(step_id):
            return ChunkResult(valid_tokens=0.0, valid_sequences=0.0, microbatches=0, seconds=0.0)

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        with self._machine.finishing(step_id):
            return StepResult(step_id, updated=False, version=0)

    async def abort_train_step(self, step_id: int) -> None:
        self._machine.abort(step_id)

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """There is no model here: nothing is written."""

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Advantages may need the KL to the reference policy: 0, because the policy does not move away from it."""
        if not needs_kl_sums(self._algorithm):
            return Prepared(meta, 0.0)
        zeros_R = torch.zeros(len(meta), dtype=torch.float64)
        columns: dict[str, Column] = {fields.KL_TO_GO_SUM: zeros_R, fields.KL_TO_GO_SQUARE_SUM: zeros_R}
        await self._data_plane.put_samples_async(meta.sample_ids, columns, meta.partition_id)
        return Prepared(meta.with_fields(*columns), 0.0)

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        """Version 0, and nothing to read: the engines have it."""
        return WeightPublication(0, WeightManifest((), ()), ())

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """There is nothing to release."""

    async def snapshot(self) -> NothingTrained:
        return NothingTrained()

    async def load_checkpoint(self, folder: Path) -> None:
        """There is nothing to read."""

    async def close(self) -> None:
        """There is nothing to end."""

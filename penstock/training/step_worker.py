"""`StepWorker`: the split train step of one rank, over any `Backend`; synchronous, on one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from penstock.algorithms.losses import LossSum
from penstock.algorithms.reduction import MetricParts, Normaliser, StepMetric
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import INPUT_IDS, group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import NonFiniteError, StepStateError
from penstock.training.accumulated import Accumulated
from penstock.training.backends.base import Backend, MicrobatchRows, Objective, Pass
from penstock.training.batching import ChunkTokens, TrainColumns
from penstock.training.interface import ChunkResult, Prepared, SnapshotTaken, StepResult
from penstock.training.objective import load_loss, policy_objective
from penstock.training.packing import Plan
from penstock.training.planning import facts_in, facts_of, plan_for, with_plan
from penstock.training.preparation import PREPARED_FROM, LogprobPasses
from penstock.training.sharding import RowFacts
from penstock.training.shares import require_planned
from penstock.training.snapshots import SnapshotShelf
from penstock.training.step import StepMachine, StepState
from penstock.training.targets import extra_fields, kept_fields, loss_normaliser, target_columns, train_fields
from penstock.weights.publication import WeightPublication, WeightSite

R = TypeVar("R")


class StepWorker:
    """The state of one rank's step: what is the same no matter how its backend computes.

    While a step is open, N = 1: microbatches deposit raw `d(sum)/dθ`. `finish` divides by N once. N is the step's
    count of valid tokens or of valid sequences, as the loss's aggregation says.

    Invariants: gradients exist only while a step is open or failed; `version` changes only in a `finish` that
    changed the weights.
    """

    def __init__(
        self,
        backend: Backend,
        data_plane: DataPlaneClient,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        *,
        version: int = 0,
    ) -> None:
        self._backend = backend
        self._data_plane = data_plane
        self._algorithm = algorithm
        self._custom_loss = load_loss(algorithm)
        self._training = training
        self._passes = LogprobPasses(backend, training)
        self._machine = StepMachine()
        self._gathered = Accumulated()
        self._copies = SnapshotShelf()
        self._moved = False
        """Whether the weights are newer than the version says: between two steps of one batch."""
        self.version = version

    @property
    def state(self) -> StepState:
        """Where the step stands."""
        return self._machine.state

    def begin(self, step_id: int) -> None:
        """Open a step."""
        self._machine.begin(step_id)
        self._gathered = Accumulated()
        self._backend.begin()

    def microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        """Forward and backward over a chunk, in as many passes as its tokens need."""
        with self._machine.microbatch(step_id):
            started = time.perf_counter()
            wanted = train_fields(self._algorithm, self._training) + kept_fields(meta)
            batch = self._data_plane.get_samples(meta, wanted)
            rows = ChunkTokens.of(batch)
            columns = TrainColumns.of(batch, rows, extra_fields(self._algorithm))
            wanted_S = columns.mask_S > 0
            plan = self._plan(meta, facts_of(rows, columns))
            microbatches = [MicrobatchRows.of(rows, indices, wanted_S) for indices in plan]
            passes = self._backend.run(microbatches, self._objective(columns))
            for microbatch, done in zip(microbatches, passes, strict=True):
                self._gather(microbatch, done, meta)
            gathered, seconds = self._gathered, time.perf_counter() - started
            gathered.tokens += columns.valid_tokens
            gathered.sequences += columns.valid_sequences
            gathered.microbatches += len(plan)
            gathered.seconds += seconds
            return ChunkResult(columns.valid_tokens, columns.valid_sequences, len(plan), seconds)

    def _plan(self, meta: KVBatchMeta, facts: tuple[RowFacts, ...]) -> Plan:
        """The microbatches to train: those that came with the rows, or as the rows' metadata says.

        A single rank plans rows anew that are not what their metadata says. One of several cannot: all of them need the
        same number of microbatches.
        """
        require_planned(meta, facts, self._backend.ranks)
        return plan_for(meta, facts, self._backend.plan_rule).trained

    def _objective(self, columns: TrainColumns) -> Objective:
        """The loss of a microbatch of this chunk, from its log-probs and the places of its tokens."""

        def objective(logprobs_T: Tensor, entropy_T: Tensor, sources_T: Tensor) -> LossSum:
            if sources_T.shape[0] == 0:  # zero weight: a rank that has nothing to train takes part in the pass
                return LossSum(logprobs_T.sum(dtype=torch.float64), {})
            targets = target_columns(
                columns,
                sources_T,
                self._algorithm,
                version=self.version,
                dtype=logprobs_T.dtype,
                device=logprobs_T.device,
            )
            return policy_objective(self._algorithm, logprobs_T, entropy_T, targets, self._custom_loss)

        return objective

    def _gather(self, microbatch: MicrobatchRows, done: Pass, meta: KVBatchMeta) -> None:
        """Add what a microbatch contributes apart from its gradients."""
        if microbatch.is_filler:
            return
        gathered = self._gathered
        gathered.flops += self._backend.flops.training(microbatch.lengths, done.sources_T.shape[0])
        if done.loss is not None:
            groups = tuple(dict.fromkeys(group_of(meta.sample_ids[index]) for index in microbatch.indices))
            gathered.add_loss(done.loss, groups)

    def finish(self, step_id: int, *, last: bool = True) -> StepResult:
        """Divide by N, clip, step; the version increments with the `last` step of a batch.

        Aborts the step and raises `NonFiniteError` if `training.nonfinite` is `stop`.
        """
        started = time.perf_counter()
        gathered = self._gathered
        with self._machine.finishing(step_id) as commit:
            measured = dict(self._backend.reduce(gathered.measured()))
            count = measured[loss_normaliser(self._algorithm).value].value
            stepped = nonfinite = False
            if count > 0:
                self._backend.scale(1 / count)
                norm = self._backend.norm()
                measured["grad_norm"] = StepMetric(norm, Normaliser.TOKENS, measured["tokens"].value)
                nonfinite = not (math.isfinite(measured["loss"].value) and math.isfinite(norm))
                if not nonfinite:
                    with commit():
                        measured["lr"] = StepMetric(self._backend.step(norm), Normaliser.MAX)
                    stepped = self._moved = True
            self._drop()
        groups = self._guilty(gathered, measured) if nonfinite else ()
        if nonfinite and self._training.nonfinite == "stop":
            raise _nonfinite_error(step_id, measured, groups, moved=self._moved)
        updated = self._tick() if last else stepped
        measured = {name: metric for name, metric in measured.items() if stepped or math.isfinite(metric.value)}
        measured["empty_steps"] = StepMetric(float(count == 0), Normaliser.MIN)
        measured["nonfinite_steps"] = StepMetric(float(nonfinite), Normaliser.NONE)
        measured |= self._speed(gathered.seconds + time.perf_counter() - started)
        return StepResult(step_id, updated, self.version, groups, measured)

    def _guilty(self, gathered: Accumulated, measured: MetricParts) -> tuple[str, ...]:
        """This rank's groups that may be why the step is not finite."""
        elsewhere = self._backend.ranks > 1 and not math.isfinite(measured["loss"].value)
        return gathered.guilty_groups(elsewhere=elsewhere)

    def _speed(self, seconds: float) -> dict[str, StepMetric]:
        """How long the step took, and on what; every rank took as long."""
        peak = self._backend.peak_tflops
        return {
            "train_seconds": StepMetric(seconds, Normaliser.NONE),
            "ranks": StepMetric(float(self._backend.ranks), Normaliser.MAX),
        } | ({} if peak is None else {"theoretical_tflops": StepMetric(peak, Normaliser.MAX)})

    def _tick(self) -> bool:
        """The batch is over: a new version, and the next learning rate, if its updates changed the weights."""
        moved, self._moved = self._moved, False
        if moved:
            self.version += 1
            self._backend.advance()
        return moved

    def abort(self, step_id: int) -> None:
        """Drop what was accumulated."""
        if self._machine.abort(step_id):
            self._drop()

    def train(self, step_id: int, metas: Sequence[KVBatchMeta]) -> StepResult:
        """A whole step; one that raises is aborted."""
        self.begin(step_id)
        try:
            for meta in metas:
                self.microbatch(step_id, meta)
            return self.finish(step_id)
        except BaseException:
            self.abort(step_id)
            raise

    def read_gradients(self, read: Callable[[Mapping[str, Tensor]], R]) -> R:
        """What `read` returns for the open step's raw gradients, which it must not modify."""
        return read(self._backend.gradients())

    def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """Write the current policy's log-prob of every token into a column; 0 for each row's first token."""
        rows = ChunkTokens.of(self._data_plane.get_samples(meta, (INPUT_IDS, *kept_fields(meta))))
        plan = plan_for(meta, facts_in(meta, rows), self._backend.plan_rule)
        column = JaggedColumn(self._passes.logprobs(rows, plan.every), rows.offsets_R1)
        self._data_plane.put_samples(meta.sample_ids, {field_name: column}, meta.partition_id)

    def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Write the columns that advantages and loss need in addition to those of the rollout.

        The metadata that comes back carries the plan, which the train passes follow as well.
        """
        started = time.perf_counter()
        rule = self._backend.plan_rule
        meta = with_plan(meta, rule)
        batch = self._data_plane.get_samples(meta, PREPARED_FROM + kept_fields(meta))
        plan = plan_for(meta, facts_in(meta, ChunkTokens.of(batch)), rule)
        columns = self._passes.added_columns(batch, plan.every, self._algorithm)
        if columns:
            self._data_plane.put_samples(meta.sample_ids, columns, meta.partition_id)
        return Prepared(meta.with_fields(*columns), time.perf_counter() - started)

    def publish(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        """The current weights, for receivers at `sites`."""
        if self.state is StepState.BROKEN:
            raise StepStateError("publish_weights: the optimizer failed half-way; load a checkpoint first")
        return self._backend.publish(self.version, sites)

    def release(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """Nobody needs a publication any more; from any thread."""
        self._backend.release(publication, still_read=still_read)

    def snapshot(self) -> SnapshotTaken:
        """Copy what a checkpoint needs; the copy takes the place of an earlier one that was not written."""
        self._machine.require_closed("snapshot")
        if self._moved:
            raise StepStateError("snapshot: the weights are between two versions; load a checkpoint first")
        return self._copies.keep(self._backend.save(self.version))

    def write_snapshot(self, number: int, folder: Path) -> None:
        """Write a copy into an existing folder and release its memory; from any thread, while steps go on."""
        self._copies.take(number).write(folder)

    def load(self, folder: Path) -> None:
        """Read a checkpoint; a broken trainer is usable again."""
        if self.state is not StepState.BROKEN:
            self._machine.require_closed("load_checkpoint")
        self.version = self._backend.load(folder)
        self._drop()
        self._moved = False
        self._machine.reset()

    def offload(self) -> None:
        """Free the device's memory; an open step keeps what it has accumulated."""
        self._backend.offload()

    def onload(self) -> None:
        """Take the device's memory again."""
        self._backend.onload()

    def close(self) -> None:
        """End the backend's threads and communicators."""
        self._backend.teardown()

    def _drop(self) -> None:
        self._backend.drop()
        self._gathered = Accumulated()


def _nonfinite_error(step_id: int, measured: MetricParts, groups: Sequence[str], *, moved: bool) -> NonFiniteError:
    weights = "weights as the updates before this one left them" if moved else "weights untouched"
    loss, norm = measured["loss"].value, measured["grad_norm"].value
    return NonFiniteError(
        f"step {step_id + 1}: loss {loss}, gradient norm {norm}, {weights}; groups "
        f"{', '.join(groups)}. Set training.nonfinite to skip to continue without such steps"
    )

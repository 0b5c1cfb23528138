"""The local worker: the split train step over one torch module, synchronous, on one thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.algorithms.losses import LossSum
from penstock.algorithms.reduction import MetricAccumulator, Normaliser
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import INPUT_IDS, group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import NonFiniteError, StepStateError
from penstock.runtime.lanes import Lanes
from penstock.training.batching import Rows, TrainColumns, build_microbatch
from penstock.training.checkpointing import LocalSnapshot, load_trainer
from penstock.training.flops import FlopCounter, peak_tflops
from penstock.training.interface import ChunkResult, Prepared, StepResult
from penstock.training.objective import load_loss, policy_objective
from penstock.training.optimizer import PolicyOptimizer
from penstock.training.packing import Batching
from penstock.training.policy import Policy
from penstock.training.preparation import PREPARED_FROM, LogprobPasses
from penstock.training.step import StepMachine, StepState
from penstock.training.targets import kept_fields, loss_normaliser, target_columns, train_fields, uses_reference
from penstock.weights.hf import named_weights
from penstock.weights.source import WeightSource

R = TypeVar("R")


@dataclass
class _Accumulated:
    """What an open step has accumulated in addition to gradients."""

    tokens: float = 0.0
    sequences: float = 0.0
    microbatches: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    losses: list[tuple[Tensor, tuple[str, ...]]] = field(default_factory=list)
    """Each microbatch's loss sum and groups, to name the groups at fault if a loss is not finite."""


@dataclass(frozen=True)
class _Pass:
    """What one microbatch produced."""

    loss: LossSum
    flops: float
    gradients: tuple[Tensor | None, ...]
    """Empty if they are already accumulated."""


class LocalWorker:
    """One model, its optimizer and the state of its step.

    While a step is open, N = 1: microbatches deposit raw `d(sum)/dθ`. `finish` divides by N once. N is the step's
    count of valid tokens or of valid sequences, as the loss's aggregation says.

    Invariants: gradients exist only while a step is open or failed; `version` changes only in a `finish` that
    changed the weights.
    """

    def __init__(
        self,
        model: Any,
        data_plane: DataPlaneClient,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        *,
        temperature: float,
        version: int = 0,
        lanes: Lanes | None = None,
        longest_row: int | None = None,
    ) -> None:
        self._lanes = lanes or Lanes("trainer")
        self._model = model
        self._data_plane = data_plane
        self._algorithm = algorithm
        self._custom_loss = load_loss(algorithm)
        self._training = training
        self._batching = Batching(training.batching)
        self._policy = Policy(
            model,
            temperature=temperature,
            chunk_tokens=training.logprob_chunk_tokens,
            gradient_checkpointing=training.gradient_checkpointing,
            entropy_gradient=algorithm.entropy_coefficient > 0,
            keep_reference=uses_reference(algorithm),
            longest_row=longest_row if self._batching is Batching.PADDED else None,
        )
        if self._batching is Batching.PACKED:
            self._policy.check_packing()
        self._passes = LogprobPasses(self._policy, training, self._lanes)
        self._optimizer = PolicyOptimizer(model, training.optimizer, training.max_steps)
        self._flops = FlopCounter.of(model)
        self._machine = StepMachine()
        self._gathered = _Accumulated()
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
        self._drop()

    def microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        """Forward and backward over a chunk, in as many passes as its tokens need."""
        with self._machine.microbatch(step_id):
            started = time.perf_counter()
            wanted = train_fields(self._algorithm, self._training) + kept_fields(meta)
            batch = self._data_plane.get_samples(meta, wanted)
            rows = Rows.of(batch)
            columns = TrainColumns.of(batch, rows)
            plan = self._passes.plan(rows, columns.trained_rows)
            apart = self._lanes.count > 1 and len(plan) > 1
            passes = self._lanes.map(lambda indices: self._forward_backward(rows, columns, indices, apart=apart), plan)
            for indices, done in zip(plan, passes, strict=True):
                self._gather(done, tuple(dict.fromkeys(group_of(meta.sample_ids[index]) for index in indices)))
            self._wait_for_device()
            gathered, seconds = self._gathered, time.perf_counter() - started
            gathered.tokens += columns.valid_tokens
            gathered.sequences += columns.valid_sequences
            gathered.microbatches += len(plan)
            gathered.seconds += seconds
            return ChunkResult(columns.valid_tokens, columns.valid_sequences, len(plan), seconds)

    def finish(self, step_id: int, *, last: bool = True) -> StepResult:
        """Divide by N, clip, step; the version increments with the `last` step of a batch.

        Aborts the step and raises `NonFiniteError` if `training.nonfinite` is `stop`.
        """
        started = time.perf_counter()
        gathered = self._gathered
        with self._machine.finishing(step_id) as commit:
            metrics = gathered.metrics.reduce(tokens=gathered.tokens, sequences=gathered.sequences)
            by_tokens = loss_normaliser(self._algorithm) is Normaliser.TOKENS
            count = gathered.tokens if by_tokens else gathered.sequences
            stepped = nonfinite = False
            if count > 0:
                self._optimizer.scale_gradients(1 / count)
                metrics["grad_norm"] = self._optimizer.gradient_norm()
                nonfinite = not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
                if not nonfinite:
                    with commit():
                        metrics["lr"] = self._optimizer.step(metrics["grad_norm"], advance=False)
                        self._wait_for_device()
                    stepped = self._moved = True
            self._drop()
        if nonfinite and self._training.nonfinite == "stop":
            raise _nonfinite_error(step_id, metrics, gathered, moved=self._moved)
        updated = self._tick() if last else stepped
        metrics = {name: value for name, value in metrics.items() if stepped or math.isfinite(value)}
        metrics |= {"empty_steps": float(count == 0), "nonfinite_steps": float(nonfinite)}
        metrics |= self._amounts(gathered, gathered.seconds + time.perf_counter() - started)
        groups = _guilty_groups(gathered) if nonfinite else ()
        return StepResult(step_id, updated, self.version, groups, metrics)

    def _tick(self) -> bool:
        """The batch is over: a new version, and the next learning rate, if its updates changed the weights."""
        moved, self._moved = self._moved, False
        self.version += moved
        self._optimizer.updates += moved
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
        return read(self._optimizer.gradients())

    def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """Write the current policy's log-prob of every token into a column; 0 for each row's first token."""
        rows = Rows.of(self._data_plane.get_samples(meta, (INPUT_IDS, *kept_fields(meta))))
        column = JaggedColumn(self._passes.logprobs(self._policy.logprobs, rows), rows.offsets_R1)
        self._data_plane.put_samples(meta.sample_ids, {field_name: column}, meta.partition_id)

    def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Write the columns that advantages and loss need in addition to those of the rollout."""
        started = time.perf_counter()
        batch = self._data_plane.get_samples(meta, PREPARED_FROM + kept_fields(meta))
        columns = self._passes.added_columns(batch, self._algorithm)
        if columns:
            self._data_plane.put_samples(meta.sample_ids, columns, meta.partition_id)
        return Prepared(meta.with_fields(*columns), time.perf_counter() - started)

    def weights(self) -> WeightSource:
        """The current weights."""
        if self.state is StepState.BROKEN:
            raise StepStateError("publish_weights: the optimizer failed half-way; load a checkpoint first")
        return WeightSource(self.version, lambda: named_weights(self._model))

    def snapshot(self) -> LocalSnapshot:
        """Copy what a checkpoint needs."""
        self._machine.require_closed("snapshot")
        if self._moved:
            raise StepStateError("snapshot: the weights are between two versions; load a checkpoint first")
        return LocalSnapshot.of(self._model, self._optimizer, self.version)

    def load(self, folder: Path) -> None:
        """Read a checkpoint; a broken trainer is usable again."""
        if self.state is not StepState.BROKEN:
            self._machine.require_closed("load_checkpoint")
        self.version = load_trainer(folder, self._model, self._optimizer).version
        self._drop()
        self._moved = False
        self._machine.reset()

    def _forward_backward(self, rows: Rows, columns: TrainColumns, indices: Sequence[int], *, apart: bool) -> _Pass:
        """One microbatch; with `apart` its gradients are returned, not accumulated, so lanes do not mix."""
        device = self._policy.device
        microbatch = build_microbatch(rows, indices, self._batching, columns.mask_S > 0).to(device)
        targets = target_columns(
            columns,
            microbatch.sources_T,
            self._algorithm,
            version=self.version,
            dtype=self._policy.exact_dtype,
            device=device,
        )
        logprobs_T, entropy_T = self._policy.logprobs(microbatch)
        loss = policy_objective(self._algorithm, logprobs_T, entropy_T, targets, self._custom_loss)
        gradients: tuple[Tensor | None, ...] = ()
        if apart:
            gradients = torch.autograd.grad(loss.total, self._optimizer.parameters, allow_unused=True)
        else:
            loss.total.backward()  # type: ignore[no-untyped-call]
        lengths: list[int] = rows.lengths_R.tolist()
        flops = self._flops.training([lengths[index] for index in indices], logprobs_T.shape[0])
        return _Pass(LossSum(loss.total.detach(), loss.metrics), flops, gradients)

    def _gather(self, done: _Pass, groups: tuple[str, ...]) -> None:
        """Add a microbatch; called in the plan's order, no matter which lane was faster."""
        if done.gradients:
            self._optimizer.add_gradients(done.gradients)
        self._gathered.metrics.add(done.loss.metrics)
        self._gathered.losses.append((done.loss.total, groups))
        self._gathered.flops += done.flops

    def _amounts(self, gathered: _Accumulated, seconds: float) -> dict[str, float]:
        achieved = gathered.flops / seconds / 1e12
        amounts = {
            "tokens": gathered.tokens,
            "sequences": gathered.sequences,
            "microbatches": float(gathered.microbatches),
            "train_seconds": seconds,
            "ranks": 1.0,
            "total_flops": gathered.flops,
            "achieved_tflops": achieved,
        }
        peak = peak_tflops(self._policy.device, self._model.dtype)
        return amounts if peak is None else amounts | {"theoretical_tflops": peak, "mfu": achieved / peak}

    def _wait_for_device(self) -> None:
        """Timings are the device's, and its errors surface in the call that caused them."""
        if self._policy.device.type == "cuda":
            torch.cuda.current_stream(self._policy.device).synchronize()

    def _drop(self) -> None:
        self._optimizer.zero_gradients()
        self._gathered = _Accumulated()


def _guilty_groups(gathered: _Accumulated) -> tuple[str, ...]:
    """Groups of the microbatches whose loss is not finite; all groups if every loss is finite."""
    guilty = [groups for loss, groups in gathered.losses if not math.isfinite(float(loss))]
    named = guilty or [groups for _, groups in gathered.losses]
    return tuple(dict.fromkeys(group for part in named for group in part))


def _nonfinite_error(step_id: int, metrics: dict[str, float], gathered: _Accumulated, *, moved: bool) -> NonFiniteError:
    weights = "weights as the updates before this one left them" if moved else "weights untouched"
    return NonFiniteError(
        f"step {step_id + 1}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}, {weights}; groups "
        f"{', '.join(_guilty_groups(gathered))}. Set training.nonfinite to skip to continue without such steps"
    )

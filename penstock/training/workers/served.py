"""A trainer as a worker: built from plain data where it lives, and called from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.model import ModelConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane.client import DataPlaneAddress, DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.opening import connect
from penstock.runtime.lanes import Lanes
from penstock.runtime.threads import in_daemon_thread
from penstock.training.gradient_comparison import GradientComparison, GradientDifference
from penstock.training.interface import ChunkResult, Prepared, SnapshotTaken, StepResult
from penstock.training.step_worker import StepWorker
from penstock.training.workers.local import load_policy, local_worker
from penstock.weights.publication import WeightPublication, WeightSite


class ServedTrainer:
    """What `WorkerTrainer` calls, over a `StepWorker`.

    Ordinary methods run one at a time, in order, on the worker's thread. Writing a snapshot and releasing weights do
    not wait for their turn: they run in threads of their own while steps go on.
    """

    def __init__(self, worker: StepWorker, data_plane: DataPlaneClient) -> None:
        self._worker = worker
        self._data_plane = data_plane
        self._compared = GradientComparison()

    def begin_train_step(self, step_id: int) -> None:
        """Open a step."""
        self._worker.begin(step_id)

    def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        """Forward and backward over a chunk."""
        return self._worker.microbatch(step_id, meta)

    def finish_train_step(self, step_id: int, *, last: bool) -> StepResult:
        """Divide, clip, step."""
        result = self._worker.finish(step_id, last=last)
        return replace(result, data_plane=self._data_plane.use()) if last else result

    def abort_train_step(self, step_id: int) -> None:
        """Drop what was accumulated."""
        self._worker.abort(step_id)

    def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """Write the current policy's per-token log-probs into a column."""
        self._worker.compute_logprobs(meta, field_name)

    def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Write the columns that advantages and loss need in addition to those of the rollout."""
        return self._worker.prepare(meta)

    def keep_gradients(self) -> float:
        """Keep a copy of the open step's raw gradients here, to compare others with; returns their norm."""
        return self._worker.read_gradients(self._compared.keep)

    def gradient_difference(self) -> GradientDifference:
        """How the open step's raw gradients differ from those that were kept."""
        return self._worker.read_gradients(self._compared.difference)

    def forget_gradients(self) -> None:
        """Free what `keep_gradients` keeps."""
        self._compared.forget()

    def publish_weights(self, sites: Sequence[WeightSite]) -> WeightPublication:
        """The current weights, for receivers at `sites`."""
        return self._worker.publish(sites)

    async def release_weights(self, publication: WeightPublication, *, still_read: bool) -> None:
        """A publication's memory can go."""
        # In a thread, because freeing a GPU's memory waits for what the GPU is computing.
        await in_daemon_thread("trainer-release", self._worker.release, publication, still_read=still_read)

    def snapshot(self) -> SnapshotTaken:
        """Copy what a checkpoint needs, and keep the copy here."""
        return self._worker.snapshot()

    async def write_snapshot(self, number: int, folder: Path) -> None:
        """Write a copy into an existing folder, while steps go on."""
        try:
            await in_daemon_thread("trainer-snapshot", self._worker.write_snapshot, number, folder)
        except SafetensorError as error:  # its class is not one of ours: elsewhere nobody could tell it from others
            raise OSError(str(error)) from error

    def load_checkpoint(self, folder: Path) -> None:
        """Read what a snapshot wrote."""
        self._worker.load(folder)

    def close(self) -> None:
        """End the backend's threads, and let go of the data plane."""
        self._worker.close()
        self._data_plane.close()


def serve_local(
    model: ModelConfig,
    device: str,
    seed: int,
    data_plane: DataPlaneAddress,
    algorithm: AlgorithmConfig,
    training: TrainingConfig,
    trainer: Mapping[str, Any],
) -> ServedTrainer:
    """A local trainer with its own weights, which fetches its rows from the data plane at this address.

    `trainer` are further options of `LocalTrainer`: `temperature`, `threads`, `lanes`, `longest_row`.
    """
    options = dict(trainer)
    lanes = Lanes("trainer-lane", options.pop("lanes"), options.pop("threads"))
    rows = connect(data_plane)
    worker = local_worker(load_policy(model, device, seed), rows, algorithm, training, lanes=lanes, **options)
    return ServedTrainer(worker, rows)

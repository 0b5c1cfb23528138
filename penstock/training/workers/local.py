"""`LocalTrainer`: a plain torch module trained in a thread of this process, on the CPU or one GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.model import ModelConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.runtime.lanes import Lanes
from penstock.runtime.local import WorkerThread
from penstock.runtime.threads import in_daemon_thread
from penstock.training.backends.local import LocalBackend
from penstock.training.gradient_comparison import GradientComparison, GradientDifference
from penstock.training.interface import (
    ChunkResult,
    Prepared,
    SnapshotTaken,
    StepResult,
    Trainer,
    TrainerSnapshot,
)
from penstock.training.step import StepState
from penstock.training.step_worker import StepWorker
from penstock.weights.hf import load_model, pick_device, silence_progress_bars
from penstock.weights.lora import attach_lora
from penstock.weights.publication import WeightPublication, WeightSite

P = ParamSpec("P")
R = TypeVar("R")


def load_policy(model: ModelConfig, device: str, seed: int) -> Any:
    """The module to train, with its adapters if `model.lora` asks for them; new ones are drawn with `seed`."""
    silence_progress_bars()
    loaded = load_model(model, pick_device(device))
    return loaded if model.lora is None else attach_lora(loaded, model.lora, seed=seed)


def local_worker(
    model: Any,
    data_plane: DataPlaneClient,
    algorithm: AlgorithmConfig,
    training: TrainingConfig,
    *,
    temperature: float,
    version: int = 0,
    lanes: Lanes | None = None,
    longest_row: int | None = None,
) -> StepWorker:
    """A step over a plain torch module; it computes in the thread that calls it, and in `lanes` if there are any."""
    backend = LocalBackend(model, algorithm, training, temperature=temperature, lanes=lanes, longest_row=longest_row)
    return StepWorker(backend, data_plane, algorithm, training, version=version)


@dataclass(frozen=True)
class ThreadSnapshot(TrainerSnapshot):
    """A copy that a worker of this process keeps."""

    worker: StepWorker
    taken: SnapshotTaken

    @property
    def bytes_to_come(self) -> int:
        return self.taken.bytes_to_come

    def write(self, folder: Path) -> None:
        self.worker.write_snapshot(self.taken.number, folder)


class LocalTrainer(Trainer):
    """The `Trainer` protocol over a `StepWorker` in a thread; calls are carried out one at a time, in call order.

    The event loop is never blocked: fetching rows, computing and file access all happen in the thread. Cancelling an
    await does not stop a call that has begun. `longest_row` is the most tokens a row can have, if known.
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
        threads: int = 0,
        lanes: int = 1,
        longest_row: int | None = None,
    ) -> None:
        self._worker = local_worker(
            model,
            data_plane,
            algorithm,
            training,
            temperature=temperature,
            version=version,
            lanes=Lanes("trainer-lane", lanes, threads),
            longest_row=longest_row,
        )
        self._compared = GradientComparison()
        self._thread = WorkerThread("trainer", threads)

    @classmethod
    def from_pretrained(
        cls,
        model: str | ModelConfig,
        data_plane: DataPlaneClient,
        *,
        algorithm: AlgorithmConfig | None = None,
        training: TrainingConfig | None = None,
        temperature: float = 1.0,
        device: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> LocalTrainer:
        """A trainer with its own weights, loaded from a model folder or hub id; it fetches rows from `data_plane`.

        `algorithm` and `training` are those sections of the settings, with their defaults if omitted. `temperature` is
        the one that responses are sampled with. `device` is `auto`, `cpu` or `cuda`; `seed` is that of new adapters, if
        `model.lora` asks for them. `options` are those of the constructor, such as `threads`.
        """
        config = ModelConfig(path=model) if isinstance(model, str) else model
        return cls(
            load_policy(config, device, seed),
            data_plane,
            algorithm or AlgorithmConfig(),
            training or TrainingConfig(),
            temperature=temperature,
            **options,
        )

    @property
    def version(self) -> int:
        """The weight version of the last finished call."""
        return self._worker.version

    @property
    def state(self) -> StepState:
        """Where the step stands after the last finished call."""
        return self._worker.state

    def _call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Queue a call of the worker."""
        return self._thread.call(function, *args, **kwargs)

    async def begin_train_step(self, step_id: int) -> None:
        """Open a step."""
        await self._call(self._worker.begin, step_id)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        """Forward and backward over a chunk."""
        return await self._call(self._worker.microbatch, step_id, meta)

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        """Divide, clip, step; version + 1 if weights changed and it is the batch's last step."""
        return await self._call(self._worker.finish, step_id, last=last)

    async def abort_train_step(self, step_id: int) -> None:
        """Drop what was accumulated."""
        await self._call(self._worker.abort, step_id)

    async def train(self, step_id: int, metas: Sequence[KVBatchMeta]) -> StepResult:
        """Begin, one microbatch call per meta, finish; a step that raises is aborted."""
        return await self._call(self._worker.train, step_id, metas)

    async def read_gradients(self, read: Callable[[Mapping[str, Tensor]], R]) -> R:
        """What `read`, called in the thread, returns for the raw gradients that the open step has accumulated."""
        return await self._call(self._worker.read_gradients, read)

    async def keep_gradients(self) -> float:
        """Keep a copy of the open step's raw gradients, to compare others with; returns their norm."""
        return await self.read_gradients(self._compared.keep)

    async def gradient_difference(self) -> GradientDifference:
        """How the open step's raw gradients differ from those that were kept."""
        return await self.read_gradients(self._compared.difference)

    async def forget_gradients(self) -> None:
        """Free what `keep_gradients` keeps."""
        self._compared.forget()

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """Write the current policy's per-token log-probs into a column."""
        await self._call(self._worker.compute_logprobs, meta, field_name)

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Write the columns that advantages and loss need in addition to those of the rollout."""
        return await self._call(self._worker.prepare, meta)

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        """The current weights, for receivers at `sites`; by default, for those in this process.

        They may read the trainer's tensors in place, until the next `finish_train_step`.
        """
        return await self._call(self._worker.publish, sites)

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """All receivers have taken a publication or failed; without this call, it ends when two more are published."""
        self._worker.release(publication, still_read=still_read)

    async def snapshot(self) -> TrainerSnapshot:
        """A copy of weights, optimizer, schedule and RNG state in CPU memory."""
        return ThreadSnapshot(self._worker, await self._call(self._worker.snapshot))

    async def load_checkpoint(self, folder: Path) -> None:
        """Read what a snapshot wrote."""
        await self._call(self._worker.load, folder)

    async def close(self) -> None:
        """End the thread once queued calls have finished, and free what was published, even if nobody waits."""
        try:
            await self._thread.close()
        finally:
            # In a thread: after a call that is stuck on a device, freeing memory there may hang too.
            await in_daemon_thread("penstock-trainer-end", self._worker.close)

"""`WorkerTrainer`: the `Trainer` protocol over a worker that lives elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import SetupError, TrainerLost, WorkerClosed, WorkerLost
from penstock.runtime.workers import WorkerHandle
from penstock.training.gradient_comparison import GradientDifference
from penstock.training.interface import ChunkResult, Prepared, SnapshotTaken, StepResult, Trainer, TrainerSnapshot
from penstock.weights.publication import WeightPublication, WeightSite

_WRITE_SECONDS = 7 * 24 * 3600.0
"""How long writing a snapshot may take here; whoever has it written has a limit that means something."""


class WorkerTrainer(Trainer):
    """A trainer whose model and thread live with a `ServedTrainer`; every call is made there, in call order.

    Rows, weights and snapshots stay there: only what describes them passes through here. Once the worker is gone, for
    whatever reason, every call raises `TrainerLost`, which says how it ended.

    Worked example: `train_microbatch` of chunks 1 and 2 are called, and the process is killed during the first. Both
    raise `TrainerLost`, and so does `abort_train_step`: the open step went with the process.
    """

    def __init__(self, worker: WorkerHandle, start_seconds: float) -> None:
        """Wait until the worker is built; blocks. One that is not built in time is killed."""
        self._worker = worker
        try:
            worker.wait_built(start_seconds)
        except TimeoutError:
            worker.kill()
            raise SetupError(
                f"{worker.name}: its process {worker.pid} is not ready after {start_seconds:g} s; if the model takes "
                "longer to load, raise runtime.timeouts.start_seconds"
            ) from None
        except WorkerLost as lost:
            worker.kill()
            raise SetupError(f"{lost}, before it was ready{_memory_hint(lost)}") from TrainerLost(str(lost))
        except BaseException:
            worker.kill()
            raise

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._worker.pid

    async def begin_train_step(self, step_id: int) -> None:
        """Open a step."""
        await self._ask("begin_train_step", step_id)

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        """Forward and backward over a chunk."""
        result: ChunkResult = await self._ask("train_microbatch", step_id, meta)
        return result

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        """Divide, clip, step; version + 1 if weights changed and it is the batch's last step."""
        result: StepResult = await self._ask("finish_train_step", step_id, last=last)
        return result

    async def abort_train_step(self, step_id: int) -> None:
        """Drop what was accumulated."""
        await self._ask("abort_train_step", step_id)

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """Have the current policy's per-token log-probs written into a column."""
        await self._ask("compute_logprobs", meta, field_name)

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        """Have the columns written that advantages and loss need in addition to those of the rollout."""
        result: Prepared = await self._ask("prepare", meta)
        return result

    async def keep_gradients(self) -> float:
        """Have a copy of the open step's raw gradients kept there, to compare others with; returns their norm."""
        norm: float = await self._ask("keep_gradients")
        return norm

    async def gradient_difference(self) -> GradientDifference:
        """How the open step's raw gradients differ from those that were kept."""
        result: GradientDifference = await self._ask("gradient_difference")
        return result

    async def forget_gradients(self) -> None:
        """Free what `keep_gradients` keeps."""
        await self._ask("forget_gradients")

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        """The current weights, for receivers at `sites`; by default, for those in the worker's process."""
        result: WeightPublication = await self._ask("publish_weights", list(sites))
        return result

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """All receivers have taken a publication or failed."""
        await self._ask("release_weights", publication, still_read=still_read)

    async def snapshot(self) -> TrainerSnapshot:
        """A copy of weights, optimizer, schedule and RNG state, which the worker keeps."""
        return _WorkerSnapshot(self._worker, await self._ask("snapshot"))

    async def load_checkpoint(self, folder: Path) -> None:
        """Read what a snapshot wrote."""
        await self._ask("load_checkpoint", folder)

    async def lost(self) -> TrainerLost:
        """Wait until its process is gone, without having been closed; says how."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[TrainerLost] = loop.create_future()

        def settle(lost: WorkerLost) -> None:
            if not found.done():
                found.set_result(_trainer_lost(lost))

        def tell(lost: WorkerLost) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(settle, lost)

        self._worker.when_lost(tell)
        return await found

    async def close(self) -> None:
        """Let the trainer end its threads, and end its process; a second call is a no-op."""
        await self._worker.close()

    def kill(self) -> None:
        """End its process now, even if it is stopped or stuck in a call; blocks for a moment. No-op once it is
        closed."""
        self._worker.kill()

    async def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with _as_trainer_lost():
            return await self._worker.call(method, *args, **kwargs)


@dataclass(frozen=True)
class _WorkerSnapshot(TrainerSnapshot):
    """A copy that a worker keeps, known here by its number."""

    worker: WorkerHandle
    taken: SnapshotTaken

    @property
    def bytes_to_come(self) -> int:
        return self.taken.bytes_to_come

    def write(self, folder: Path) -> None:
        with _as_trainer_lost():
            self.worker.call_blocking("write_snapshot", self.taken.number, folder, seconds=_WRITE_SECONDS)


@contextlib.contextmanager
def _as_trainer_lost() -> Iterator[None]:
    """A worker that is gone, as the trainer that went with it."""
    try:
        yield
    except WorkerLost as lost:
        raise _trainer_lost(lost) from None


def _trainer_lost(lost: WorkerLost) -> TrainerLost:
    how = str(lost)
    if isinstance(lost, WorkerClosed):
        return TrainerLost(how)
    return TrainerLost(
        f"{how}. The trainer has a process of its own (runtime.trainer_process: true), and weights and optimizer state "
        f"went with it{_memory_hint(lost)}"
    )


def _memory_hint(lost: WorkerLost) -> str:
    if "SIGKILL" not in str(lost):
        return ""
    return ". If nobody killed it, the machine may have run out of memory; penstock verify estimates what the run needs"

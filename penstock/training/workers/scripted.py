"""The scripted trainer: the interface and state machine of a real one, with exact timings and no model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.algorithms.reduction import Normaliser, StepMetric
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.interface import ChunkResult, Prepared, StepResult
from penstock.training.step import StepMachine
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.publisher import WeightPublisher


@dataclass(frozen=True)
class TrainedChunk:
    """One call of `train_microbatch`, as it happened."""

    step_id: int
    version: int
    group_ids: tuple[str, ...]
    began: float
    ended: float


@dataclass(frozen=True)
class ScriptedSnapshot:
    """Only the version."""

    version: int
    bytes_to_come: int = 0

    def write(self, folder: Path) -> None:
        (folder / "scripted.txt").write_text(f"{self.version}\n", encoding="utf-8")


@dataclass
class ScriptedTrainer:
    """Takes `chunk_seconds(meta)` for a chunk and `finish_seconds` for the end of a step, one call at a time.

    Hooks let tests fail a call: the call raises what they raise. `trained` and `finished` record what happened.
    """

    chunk_seconds: Callable[[KVBatchMeta], float] = lambda meta: 0.0
    finish_seconds: float = 0.0
    before_chunk: Callable[[int, KVBatchMeta], None] = lambda step_id, meta: None
    version: int = 0
    trained: list[TrainedChunk] = field(default_factory=list)
    finished: list[StepResult] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    machine: StepMachine = field(default_factory=StepMachine)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _chunks: int = 0
    _publisher: WeightPublisher = field(default_factory=WeightPublisher)

    async def begin_train_step(self, step_id: int) -> None:
        async with self._turn:
            self.machine.begin(step_id)
            self._chunks = 0

    async def train_microbatch(self, step_id: int, meta: KVBatchMeta) -> ChunkResult:
        async with self._turn:
            with self.machine.microbatch(step_id):
                began = time.monotonic()
                self.before_chunk(step_id, meta)
                await asyncio.sleep(self.chunk_seconds(meta))
                ended = time.monotonic()
            self._chunks += 1
            self.trained.append(TrainedChunk(step_id, self.version, meta.group_ids, began, ended))
            return ChunkResult(float(meta.total_tokens), float(len(meta)), 1, ended - began)

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        async with self._turn:
            with self.machine.finishing(step_id) as commit:
                await asyncio.sleep(self.finish_seconds)
                updated = self._chunks > 0
                with commit():
                    self.version += int(updated and last)
            measured = {"empty_steps": StepMetric(float(not updated), Normaliser.MIN)}
            result = StepResult(step_id, updated=updated, version=self.version, measured=measured)
            self.finished.append(result)
            return result

    async def abort_train_step(self, step_id: int) -> None:
        async with self._turn:
            if self.machine.abort(step_id):
                self.aborted.append(step_id)

    async def compute_logprobs(self, meta: KVBatchMeta, field_name: str) -> None:
        """There is no model: nothing is written."""

    async def prepare(self, meta: KVBatchMeta) -> Prepared:
        """There is no model: nothing is written."""
        return Prepared(meta, 0.0)

    async def publish_weights(self, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        return self._publisher.publish(self.version, PolicyWeights.given(()), sites)

    async def release_weights(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        self._publisher.release(publication, still_read=still_read)

    async def snapshot(self) -> ScriptedSnapshot:
        return ScriptedSnapshot(self.version)

    async def load_checkpoint(self, folder: Path) -> None:
        self.version = int((folder / "scripted.txt").read_text(encoding="utf-8"))

    async def close(self) -> None:
        """Release what was published."""
        self._publisher.close()

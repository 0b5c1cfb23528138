"""A trainer's side of weight sync: lays out each version once, for everybody who reads it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.errors import WeightSyncError
from penstock.runtime.free_memory import free_bytes
from penstock.weights.plan import Transport, wanted_transports
from penstock.weights.policy_weights import PolicyWeights, ReadTensors
from penstock.weights.publication import (
    Endpoint,
    InProcessEndpoint,
    WeightManifest,
    WeightPublication,
    WeightSite,
    lay_out,
)
from penstock.weights.site import site_of
from penstock.weights.transports import in_process
from penstock.weights.transports.base import PublishedMemory
from penstock.weights.transports.cuda_driver import CudaIpcUnavailable
from penstock.weights.transports.cuda_ipc import PublishedGpuMemory
from penstock.weights.transports.shared_memory import PublishedSharedMemory

_ALIVE = 2
"""Publications whose memory exists at the same time: one that is still read, and the next."""
_ROOM = 1.25
"""How much more memory must be free than merged weights take, if they are to be kept until they are read."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Alive:
    """A publication that has not been released, and what it holds."""

    number: int
    offered: tuple[InProcessEndpoint, ...]
    memories: dict[Transport, PublishedMemory]


class WeightPublisher:
    """Publishes versions of one policy, one at a time.

    Receivers in this process read the policy's own tensors, which must not change before they have; all others read
    memory that the weights are copied to. Each tensor is read, and adapters merged, once per publication, however many
    receivers there are; only if there is no room for merged weights do receivers in this process merge them again, one
    matrix at a time.

    Invariants: at most two publications are alive; a third ends the oldest. Memory is written again only after a
    `release` that says that nobody reads it, so a receiver never sees a mix of two versions. Memory that somebody may
    still read is freed by a second `release`, or at the end.

    Worked example, receivers in other processes: `publish` of version 1 takes memory A. One receiver is slow, so 2 is
    published into B. `release` of 1, then of 2: A is kept for the next version, B is freed. Had the slow receiver been
    given up (`still_read`), A would have been kept aside, and freed by a second `release` once the receiver is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._alive: list[_Alive] = []
        self._spare: dict[Transport, PublishedMemory] = {}
        self._still_read: list[_Alive] = []
        """Released, while a receiver that was given up may have its memory open."""
        self._known: set[int] = set()
        """Processes of receivers that have been published for."""
        self._closed = False

    def publish(self, version: int, weights: PolicyWeights, sites: Sequence[WeightSite] = ()) -> WeightPublication:
        """Lay out the weights for receivers at `sites`; without any, for receivers in this process."""
        manifest = lay_out(weights.shapes)
        self._make_room()
        wanted = self._wanted(site_of(weights.device), sites)
        memories: dict[Transport, PublishedMemory] = {}
        try:
            for transport in sorted(wanted - {Transport.IN_PROCESS}, key=list(Transport).index):
                self._reserve(transport, manifest, weights.device, memories)
            endpoints = _written(manifest, weights, list(memories.values()))
            readable = _readable_here(manifest, weights, list(memories.values()))
            with self._lock:
                if self._closed:  # while this was written, by a run that does not wait for it
                    raise WeightSyncError(f"weights of version {version} cannot be published: their trainer is closed")
                offered = (in_process.offer(readable),) if Transport.IN_PROCESS in wanted else ()
                number = next(self._numbers)
                self._alive.append(_Alive(number, offered, memories))
        except BaseException:
            for memory in memories.values():
                memory.close()
            raise
        return WeightPublication(version, manifest, (*offered, *endpoints), number)

    def release(self, publication: WeightPublication, *, still_read: bool = False) -> None:
        """Nobody needs the publication any more; from any thread. A further call is a no-op.

        With `still_read`, a receiver that was given up may still have the memory open: it is neither written again nor
        freed before a second call says that nobody reads it. Memory of a GPU must not be freed under its reader.
        """
        with self._lock:
            ended, self._alive = _parted(self._alive, publication)
            over, self._still_read = _parted(self._still_read, publication, keep=still_read)
            if still_read and not self._closed:
                self._still_read += ended
        for alive in ended:
            for endpoint in alive.offered:
                in_process.withdraw(endpoint)
            if not still_read or self._closed:
                self._end(alive, keep=not still_read)
        for alive in over:
            self._end(alive, keep=False)

    def close(self) -> None:
        """End all publications; a second call is a no-op."""
        with self._lock:
            ended, self._closed = [*self._alive, *self._still_read], True
            self._alive, self._still_read = [], []
            spare, self._spare = self._spare, {}
        for alive in ended:
            self._end(alive, keep=False)
        for memory in spare.values():
            memory.close()

    def _wanted(self, here: WeightSite, sites: Sequence[WeightSite]) -> set[Transport]:
        """What to publish through; receivers on this GPU get shared memory too at first, in case the GPU's fails."""
        wanted = set(wanted_transports(here, sites)) if sites else {Transport.IN_PROCESS}
        new = {site.process for site in sites} - self._known
        self._known |= new
        if Transport.CUDA_IPC in wanted and new:
            wanted.add(Transport.SHARED_MEMORY)
        return wanted

    def _reserve(
        self,
        transport: Transport,
        manifest: WeightManifest,
        device: torch.device,
        memories: dict[Transport, PublishedMemory],
    ) -> None:
        """Take memory of a kind for a publication; where the GPU has none to share, CPU memory takes its place."""
        if transport in memories:  # it already took the place of the GPU's
            return
        with self._lock:
            memory = self._spare.pop(transport, None)
        if memory is None:
            memory = PublishedGpuMemory(device) if transport is Transport.CUDA_IPC else PublishedSharedMemory()
        try:
            memory.reserve(manifest)
        except CudaIpcUnavailable as error:
            memory.close()
            _log.warning("weights go to engines through CPU memory, which takes longer: %s", error)
            self._reserve(Transport.SHARED_MEMORY, manifest, device, memories)
        except BaseException:
            memory.close()
            raise
        else:
            memories[transport] = memory

    def _make_room(self) -> None:
        """End what is too old to be alive next to one more publication."""
        with self._lock:
            ended, self._alive = self._alive[: 1 - _ALIVE], self._alive[1 - _ALIVE :]
        for alive in ended:
            self._end(alive, keep=False)

    def _end(self, alive: _Alive, *, keep: bool) -> None:
        for endpoint in alive.offered:
            in_process.withdraw(endpoint)
        for transport, memory in alive.memories.items():
            with self._lock:
                kept = keep and not self._closed and transport not in self._spare
                if kept:
                    self._spare[transport] = memory
            if not kept:
                memory.close()


def _parted(
    known: list[_Alive], publication: WeightPublication, *, keep: bool = False
) -> tuple[list[_Alive], list[_Alive]]:
    """What belongs to a publication, and the rest; with `keep`, all is the rest."""
    mine = [alive for alive in known if alive.number == publication.number and not keep]
    return mine, [alive for alive in known if alive not in mine]


def _written(manifest: WeightManifest, weights: PolicyWeights, memories: list[PublishedMemory]) -> list[Endpoint]:
    """Read every tensor once, into all memories."""
    if memories:
        for entry, (_, tensor) in zip(manifest.entries, weights.tensors(), strict=True):
            for memory in memories:
                memory.put(entry, tensor)
    return [memory.finish() for memory in memories]


def _readable_here(manifest: WeightManifest, weights: PolicyWeights, memories: list[PublishedMemory]) -> ReadTensors:
    """What receivers in this process read: the tensors themselves, or if those are computed, what they came to."""
    if not weights.computed:
        return weights.tensors
    if memories:
        return memories[0].tensors
    if free_bytes(weights.device) > _ROOM * manifest.total_bytes:
        merged = tuple(weights.tensors())
        return lambda: iter(merged)
    return weights.tensors

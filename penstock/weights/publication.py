"""One version of a trainer's weights as plain data: what the tensors are, where they lie, how to read them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import WeightSyncError
from penstock.runtime.memory import MemoryAddress
from penstock.runtime.wire.crossing import crosses

BUCKET_BYTES = 2**30
"""How large a bucket gets before the next one begins; a tensor that is larger has a bucket of its own."""
ALIGNMENT = 256
"""Where a tensor may begin in its bucket: a multiple of this suits every dtype, CPU and GPU."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
"""The dtypes that weights may have, and the size of one number."""


@crosses
@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a publication: what it is, and where it lies."""

    name: str
    """Its Hugging Face name; tied weights appear once."""
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    """Of its first byte in the bucket."""
    nbytes: int


@crosses
@dataclass(frozen=True)
class WeightManifest:
    """All tensors of a publication, laid out one after the other in few large buffers, the buckets.

    Invariants: names are unique, tensors lie inside their bucket and do not overlap, and sizes match dtypes and shapes;
    a manifest that arrived from elsewhere has been checked for all of them.

    Worked example: two float32 matrices of 8 by 8 and one of 2 GiB become the buckets (512, 2 GiB), the small ones at
    offsets 0 and 256 of the first.
    """

    entries: tuple[TensorEntry, ...]
    buckets: tuple[int, ...]
    """The size of each bucket in bytes."""

    def __post_init__(self) -> None:
        ends = [0] * len(self.buckets)
        if len({entry.name for entry in self.entries}) != len(self.entries):
            raise WeightSyncError("a manifest of weights names a tensor twice")
        for entry in self.entries:
            wanted = DTYPE_BYTES.get(entry.dtype, -1) * math.prod(entry.shape)
            if min(entry.shape, default=0) < 0 or entry.nbytes != wanted or not 0 <= entry.bucket < len(ends):
                raise WeightSyncError(f"the manifest of weights contradicts itself at {entry}")
            if not ends[entry.bucket] <= entry.offset <= self.buckets[entry.bucket] - entry.nbytes:
                raise WeightSyncError(f"the manifest of weights has {entry.name} outside of its bucket, or overlapping")
            ends[entry.bucket] = entry.offset + entry.nbytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.buckets)

    @property
    def bucket_starts(self) -> tuple[int, ...]:
        """Where each bucket begins if they lie one after the other."""
        return tuple(sum(self.buckets[:index]) for index in range(len(self.buckets)))


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int = BUCKET_BYTES) -> WeightManifest:
    """The manifest of tensors given as name, dtype and shape, in that order."""
    entries: list[TensorEntry] = []
    buckets: list[int] = []
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BYTES:
            raise WeightSyncError(f"{name} is of {dtype}, which published weights cannot be")
        size = DTYPE_BYTES[dtype] * math.prod(shape)
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        if not buckets or buckets[-1] + taken > max(bucket_bytes, taken):
            buckets.append(0)
        entries.append(TensorEntry(name, dtype, tuple(shape), len(buckets) - 1, buckets[-1], size))
        buckets[-1] += taken
    return WeightManifest(tuple(entries), tuple(buckets))


@crosses
@dataclass(frozen=True)
class WeightSite:
    """Where somebody's weights live; decides how others can reach them."""

    machine: str
    process: int
    device: str = "cpu"
    """`cpu`, or a GPU's UUID."""


@crosses
@dataclass(frozen=True)
class InProcessEndpoint:
    """The trainer's own tensors, for receivers in its process."""

    machine: str
    process: int
    key: int
    """Under which the process has them."""


@crosses
@dataclass(frozen=True)
class SharedMemoryEndpoint:
    """Buckets one after the other in CPU memory, for processes on the same machine."""

    machine: str
    address: MemoryAddress


@crosses
@dataclass(frozen=True)
class CudaIpcEndpoint:
    """Buckets in a GPU's memory, for processes that use the same GPU."""

    machine: str
    process: int
    device: str
    """The GPU's UUID."""
    handles: tuple[bytes, ...]
    """What opens each bucket."""


Endpoint: TypeAlias = InProcessEndpoint | SharedMemoryEndpoint | CudaIpcEndpoint


@crosses
@dataclass(frozen=True)
class WeightPublication:
    """One version of a trainer's weights, and every way to read it. Plain data: it can be handed to any process.

    What the endpoints lead to exists until it is released, or until its trainer has published twice more.
    """

    version: int
    manifest: WeightManifest
    endpoints: tuple[Endpoint, ...]
    number: int = 0
    """Which publication of its trainer it is: a version may be published more than once."""

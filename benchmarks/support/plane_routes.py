"""Ways from one process to another that the data plane's benchmark compares.

A route has two ends. The writer's end lives in the benchmark's process: `put` writes a batch under a name and `clear`
removes it again. The reader's end is plain data that travels to the reader's process, a Ray actor; there `open`
connects it and `get` returns token ids of the batch, with all columns at hand as values and offsets.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.support.plane_cases import MANY, Batch
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneAddress, DataPlaneOwner
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.opening import connect

PARTITION = "speed"


class ReaderEnd(Protocol):
    """The reader's end of a route."""

    def open(self) -> None:
        """Connect, in the reader's process."""

    def get(self, sample_ids: Sequence[str], names: Sequence[str], put: Any) -> Tensor:
        """Fetch the named columns; `put` is what the writer's `put` returned. Returns all token ids."""

    def close(self) -> None:
        """Disconnect."""


class Route(Protocol):
    """The writer's end of a route."""

    name: str

    def reader_end(self) -> ReaderEnd:
        """The other end, not yet connected."""

    def put(self, batch: Batch, sample_ids: Sequence[str]) -> Any:
        """Write a batch; returns what the reader needs apart from the ids."""

    def clear(self, sample_ids: Sequence[str], put: Any) -> None:
        """Remove it."""

    def close(self) -> None:
        """End everything that the route has started."""


@dataclass
class AdapterRoute:
    """Through `DataPlaneClient`, as a run uses it: the owner writes, a client in the reader's process fetches."""

    name: str
    owner: DataPlaneOwner

    def __post_init__(self) -> None:
        self.owner.register_partition(PARTITION, fields.schema(*MANY))

    def reader_end(self) -> ReaderEnd:
        return AdapterReader(self.owner.address())

    def put(self, batch: Batch, sample_ids: Sequence[str]) -> None:
        self.owner.put_samples(sample_ids, batch.columns, PARTITION)

    def clear(self, sample_ids: Sequence[str], put: None) -> None:
        self.owner.clear_samples(sample_ids, PARTITION)

    def close(self) -> None:
        self.owner.close()


@dataclass
class AdapterReader:
    """A client of the data plane with this address."""

    address: DataPlaneAddress

    def open(self) -> None:
        self._client = connect(self.address)

    def get(self, sample_ids: Sequence[str], names: Sequence[str], put: None) -> Tensor:
        meta = KVBatchMeta(PARTITION, tuple(sample_ids), frozenset(names), (0,) * len(sample_ids))
        return self._client.get_samples(meta, names).jagged(fields.INPUT_IDS).values

    def close(self) -> None:
        self._client.close()


class RayRoute:
    """`ray.put` and `ray.get` of numpy arrays, which Ray's object store hands to readers without a copy."""

    name = "ray"

    def reader_end(self) -> ReaderEnd:
        return RayReader()

    def put(self, batch: Batch, sample_ids: Sequence[str]) -> Any:
        import ray

        columns = batch.columns.items()
        # In a list: a reference that is an argument itself would be fetched before the reader's clock runs.
        return [ray.put({name: (column.values.numpy(), column.offsets_R1.numpy()) for name, column in columns})]

    def clear(self, sample_ids: Sequence[str], put: list[Any]) -> None:
        put.clear()

    def close(self) -> None:
        """Ray itself belongs to the benchmark."""


class RayReader:
    """`ray.get`, and tensors over what it returns."""

    def open(self) -> None:
        warnings.filterwarnings("ignore", message=".*not writable.*")

    def get(self, sample_ids: Sequence[str], names: Sequence[str], put: list[Any]) -> Tensor:
        import ray

        found = ray.get(put[0])
        tensors = {name: tuple(torch.from_numpy(part) for part in found[name]) for name in names}
        return tensors[fields.INPUT_IDS][0]

    def close(self) -> None:
        """Nothing is open."""


class Memcpy:
    """The limit: one copy of the same bytes within a process, into memory that was written before."""

    def __init__(self, batch: Batch) -> None:
        sources = [column.values.numpy() for column in batch.columns.values()]
        self._pairs = [(np.zeros_like(source), source) for source in sources]

    def copy(self) -> None:
        """Once."""
        for target, source in self._pairs:
            np.copyto(target, source)

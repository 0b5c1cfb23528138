"""TransferQueue without Penstock: its own controller, storage units and clients, with jagged nested tensors.

This is what a careful user of TransferQueue writes to move the same rows: one TensorDict per batch, whose columns are
nested tensors over the values and offsets at hand (nothing is copied to make them), rows addressed by key as its own
key-value calls do. Controller and storage units are started here, in the Ray namespace of the benchmark, as `tq.init`
would start them, but neither found nor ended by anybody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.plane_cases import Batch
from benchmarks.support.plane_routes import PARTITION, ReaderEnd
from penstock.data_plane import fields
from penstock.data_plane.adapters.mooncake.environment import set_environment
from penstock.data_plane.adapters.mooncake.master import MooncakeMaster

SIMPLE, MOONCAKE = "SimpleStorage", "MooncakeStore"
"""TransferQueue's names of its backends."""
HOST = "127.0.0.1"
UNITS = 2
"""TransferQueue's own default."""
SEGMENT_BYTES, BUFFER_BYTES = 1 << 30, 1 << 28
"""Memory that each client of Mooncake gives to the store, and that it copies through."""


@dataclass
class RawReader:
    """TransferQueue's client; `manager` and `config` are what its storage manager is made of."""

    controller: Any
    manager: str
    config: dict[str, Any]
    client_id: str = "reader"

    def open(self) -> None:
        if self.manager == MOONCAKE:
            set_environment(HOST)
        from transfer_queue.client import TransferQueueClient

        self.client = TransferQueueClient(client_id=self.client_id, controller_info=self.controller)
        self.client.initialize_storage_manager(manager_type=self.manager, config=dict(self.config))

    def get(self, sample_ids: Sequence[str], names: Sequence[str], put: None) -> Tensor:
        found = self.client.kv_retrieve_meta(keys=list(sample_ids), partition_id=PARTITION, create=False)
        # Selecting copies all metadata, so nobody does it who wants all fields.
        wanted = found if set(found.field_names) == set(names) else found.select_fields(list(names))
        batch = self.client.get_data(wanted)
        columns = {name: (batch[name].values(), batch[name].offsets()) for name in names}
        return columns[fields.INPUT_IDS][0]

    def close(self) -> None:
        storage = getattr(self.client.storage_manager, "storage_client", None)
        if storage is not None:  # before its master ends: it would go on looking for it
            storage.close()
        self.client.close()


class RawRoute:
    """A writer's client, and whatever was started for it."""

    def __init__(self, name: str, manager: str, config: dict[str, Any], ends: Sequence[Callable[[], None]]) -> None:
        """`ends` are called when the route is closed, after its controller has ended."""
        from transfer_queue.controller import TransferQueueController
        from transfer_queue.utils.zmq_utils import process_zmq_server_info

        self.name = name
        self._controller, self._ends = TransferQueueController.remote(), ends
        self._info = process_zmq_server_info(self._controller)
        self._manager, self._config = manager, config
        self._writer = RawReader(self._info, manager, config, "writer")
        self._writer.open()

    def reader_end(self) -> ReaderEnd:
        return RawReader(self._info, self._manager, self._config)

    def put(self, batch: Batch, sample_ids: Sequence[str]) -> None:
        from tensordict import TensorDict

        client = self._writer.client
        nested = {
            name: torch.nested.nested_tensor_from_jagged(column.values, column.offsets_R1)
            for name, column in batch.columns.items()
        }
        meta = client.kv_retrieve_meta(keys=list(sample_ids), partition_id=PARTITION, create=True)
        client.put(TensorDict(nested, batch_size=len(sample_ids)), meta)

    def clear(self, sample_ids: Sequence[str], put: None) -> None:
        client = self._writer.client
        client.clear_samples(client.kv_retrieve_meta(keys=list(sample_ids), partition_id=PARTITION, create=False))

    def close(self) -> None:
        import ray

        self._writer.close()
        ray.kill(self._controller)
        for end in self._ends:
            end()


def simple_storage() -> RawRoute:
    """The backend SimpleStorage."""
    import ray
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from transfer_queue.utils.zmq_utils import process_zmq_server_info

    settings = {"total_storage_size": None, "num_data_storage_units": UNITS}
    units = {f"unit-{number}": SimpleStorageUnit.remote(config=settings) for number in range(UNITS)}
    config = settings | {"zmq_info": process_zmq_server_info(units)}
    return RawRoute("tq_raw", SIMPLE, config, [partial(ray.kill, unit) for unit in units.values()])


def mooncake_store() -> RawRoute:
    """The backend MooncakeStore, with a master of its own."""
    master = MooncakeMaster(HOST)
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
        "local_hostname": HOST,
        "protocol": "tcp",
        "global_segment_size": SEGMENT_BYTES,
        "local_buffer_size": BUFFER_BYTES,
    }
    try:
        return RawRoute("mooncake_raw", MOONCAKE, config, [master.close])
    except BaseException:
        master.close()
        raise

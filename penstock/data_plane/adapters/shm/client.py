"""The `shm` adapter's client, the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.data_plane.adapters.shm.layout import PutPlan
from penstock.data_plane.adapters.shm.links import ShmLocalLink, ShmRemoteLink
from penstock.data_plane.adapters.shm.reading import ReadBuffer, read_field
from penstock.data_plane.columns import Column
from penstock.data_plane.store.client import StoreClient
from penstock.data_plane.store.link import FieldRuns


class ShmDataPlane(StoreClient):
    """Rows in shared memory; tensors that are read as they were written are views of it.

    A view stays valid as long as somebody holds it, whatever happens to its row, the owner and this client. As in every
    adapter, columns are not to be changed in place: other readers see the same memory.
    """

    _link: ShmLocalLink | ShmRemoteLink

    def _laid_out(self, columns: Mapping[str, Column]) -> PutPlan:
        return PutPlan(columns)

    def _fill(self, plan: PutPlan, reserved: Any) -> None:
        plan.write(self._link.memory_of(reserved))

    def _read(self, found: FieldRuns[ReadBuffer]) -> dict[str, Column]:
        return {name: read_field(name, runs) for name, runs in found.items()}

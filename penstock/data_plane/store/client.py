"""The client of a store, the same in every process."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column
from penstock.data_plane.field_spec import FieldSpec
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.schema import Schema
from penstock.data_plane.store.link import FieldRuns, Link
from penstock.data_plane.store.messages import Layout, PutRequest, PutWithdrawn
from penstock.errors import DataPlaneTimeout
from penstock.runtime.cancellation import to_the_end

_WITHDRAW_SECONDS = 10.0
"""How long the owner may take to confirm that a put no longer waits."""


class Plan(Protocol):
    """A put that is ready to be written; each adapter has its own class."""

    @property
    def layout(self) -> Layout:
        """How it lies in memory."""


class StoreClient(DataPlaneClient):
    """Rows whose index a store keeps; an adapter adds how their bytes are laid out, written and read."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._schemas: dict[str, Schema] = {}

    @abstractmethod
    def _laid_out(self, columns: Mapping[str, Column]) -> Plan:
        """A put of these columns, which have passed the schema's check."""

    @abstractmethod
    def _fill(self, plan: Any, reserved: Any) -> None:
        """Write a put into the memory that it has got."""

    @abstractmethod
    def _read(self, found: FieldRuns[Any]) -> dict[str, Column]:
        """The columns of at least one row."""

    def register_partition(self, partition_id: str, fields: Sequence[FieldSpec]) -> None:
        self._link.register(partition_id, tuple(fields))

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        plan, request = self._plan(sample_ids, fields, partition_id, tags)
        self._write(plan, self._wait_for_room(request))

    async def put_samples_async(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        """`put_samples` off the event loop, without a thread while it waits for room.

        Cancelled while it waits, it writes nothing; later, it ends only when the write has, so that a clear can follow.
        """
        plan, request = await self._in_thread(self._plan, sample_ids, fields, partition_id, tags)
        reserved = await self._await_room(request)
        await to_the_end(self._in_thread(self._write, plan, reserved))

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        found = self._link.find(meta.partition_id, meta.sample_ids, tuple(select_fields))
        if not meta.sample_ids:
            schema = self._schema(meta.partition_id)
            schema.require_known(select_fields, meta.partition_id)
            return SampleBatch((), {name: schema.empty_column(name) for name in select_fields})
        return SampleBatch(meta.sample_ids, self._read(found))

    def link_samples(self, meta: KVBatchMeta, select_fields: Sequence[str], partition_id: str) -> None:
        self._link.link_rows(meta.partition_id, meta.sample_ids, tuple(select_fields), partition_id)

    def begin_claim(self, partition_id: str, task_name: str, fields: Sequence[str], batch_size: int) -> _Claim:
        return _Claim(self._link, self._link.claim(partition_id, task_name, tuple(fields), batch_size))

    def check_consumption_status(self, partition_id: str, task_name: str) -> dict[str, bool]:
        return self._link.status(partition_id, task_name)

    def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        self._link.clear(tuple(sample_ids), partition_id)

    def count_samples(self, partition_id: str) -> int:
        return self._link.count(partition_id)

    def close(self) -> None:
        self._link.close()
        super().close()

    def _schema(self, partition_id: str) -> Schema:
        known = self._schemas.get(partition_id)
        if known is None:
            # Kept for good: a partition's fields never change.
            known = self._schemas[partition_id] = self._link.schema(partition_id)
        return known

    def _plan(
        self, sample_ids: Sequence[str], fields: Mapping[str, Column], partition_id: str, tags: Sequence[Tags] | None
    ) -> tuple[Plan, PutRequest]:
        self._schema(partition_id).check_put(sample_ids, fields, tags, partition_id)
        plan = self._laid_out(fields)
        plain_tags = None if tags is None else tuple(dict(each) for each in tags)
        return plan, PutRequest(partition_id, tuple(sample_ids), plan.layout, plain_tags)

    def _write(self, plan: Plan, reserved: Any) -> None:
        try:
            self._fill(plan, reserved)
        except BaseException:
            self._link.abandon(reserved)
            raise
        self._link.commit(reserved)

    def _wait_for_room(self, request: PutRequest) -> Any:
        future = self._link.reserve(request)
        try:
            return future.result(self._link.full_seconds)
        except WaitedTooLong:
            self._link.withdraw(future)
            return self._last_word(future, request, _WITHDRAW_SECONDS)
        except (KeyboardInterrupt, SystemExit):
            self._stop_waiting(future)
            raise

    async def _await_room(self, request: PutRequest) -> Any:
        future = self._link.reserve(request)
        granted = asyncio.wrap_future(future)
        granted.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait({granted}, timeout=self._link.full_seconds)
            if not granted.done():
                self._link.withdraw(future)
                await asyncio.wait({granted}, timeout=_WITHDRAW_SECONDS)
        except asyncio.CancelledError:
            self._stop_waiting(future)
            await asyncio.wait({granted}, timeout=_WITHDRAW_SECONDS)
            raise
        return self._last_word(future, request, 0)

    def _last_word(self, future: Future[Any], request: PutRequest, patience: float) -> Any:
        """What a put has got that was granted or withdrawn; waits for up to `patience` seconds."""
        try:
            return future.result(patience)
        except PutWithdrawn as withdrawn:
            raise DataPlaneTimeout(
                f"no room for a put of {request.layout.size / 1e9:.3g} GB after {self._link.full_seconds:g} s: "
                f"{withdrawn}. Rows are cleared once they are trained; raise data_plane.capacity_gb, or lower "
                "buffer.max_buffered_groups"
            ) from None
        except WaitedTooLong:
            self._stop_waiting(future)
            raise DataPlaneTimeout("the data plane does not answer; a put waited for room") from None

    def _stop_waiting(self, future: Future[Any]) -> None:
        """Withdraw a put, and free its memory should it be granted nevertheless."""

        def hear(ended: Future[Any]) -> None:
            if not ended.cancelled() and ended.exception() is None:
                self._link.abandon(ended.result())

        self._link.withdraw(future)
        future.add_done_callback(hear)


@dataclass(frozen=True)
class _Claim:
    link: Link
    future: Future[KVBatchMeta]

    def withdraw(self) -> None:
        self.link.withdraw(self.future)

    def give_back(self, meta: KVBatchMeta) -> None:
        self.link.give_back(self.future)

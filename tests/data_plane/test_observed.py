"""One event for each operation, whatever becomes of it; totals, bytes and latencies of a client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.models import DataPlaneConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.client import DataPlaneClient, DataPlaneOwner
from penstock.data_plane.columns import JaggedColumn, ObjectColumn
from penstock.data_plane.narrow import NarrowClient
from penstock.data_plane.observing import meter
from penstock.data_plane.observing.client import ObservedAddress, ObservedClient, ObservedOwner
from penstock.data_plane.observing.events import DataPlaneEvent, DataPlaneOperation, OperationStatus
from penstock.data_plane.observing.latencies import Latencies
from penstock.data_plane.observing.meter import ClientMeter
from penstock.data_plane.opening import connect, open_data_plane
from penstock.errors import DataPlaneError, DataPlaneTimeout, MissingRowError
from tests.data_plane.support import FIELDS, LARGE, MB, SCHEMA, columns, meta_of

LONG = 60.0
OK, ERROR, TIMEOUT = OperationStatus.OK, OperationStatus.ERROR, OperationStatus.TIMEOUT


@pytest.fixture(params=["memory", "shm", "shm-connected"])
def observed(request: pytest.FixtureRequest) -> Iterator[ObservedClient]:
    """A client of each adapter, observed, with a partition "p"."""
    owner = ObservedOwner(MemoryDataPlane() if request.param == "memory" else ShmOwner(10 * MB))
    client = owner if request.param != "shm-connected" else connect(owner.address())
    assert isinstance(client, ObservedClient)
    owner.register_partition("p", SCHEMA)
    yield client
    client.close()
    owner.close()


def heard(client: ObservedClient) -> list[DataPlaneEvent]:
    """All events from now on, as they come."""
    events: list[DataPlaneEvent] = []
    client.listen(events.append)
    return events


def facts(event: DataPlaneEvent) -> tuple[Any, ...]:
    return event.operation.value, event.partition_id, event.rows, event.status


def test_every_call_makes_one_event(observed: ObservedClient) -> None:
    events, before = heard(observed), time.monotonic()
    observed.register_partition("q", SCHEMA)
    observed.put_samples(["a", "b"], columns([3, 4]), "p")
    observed.get_samples(meta_of("p", "a", "b"), FIELDS)
    observed.link_samples(meta_of("p", "a"), FIELDS, "other")
    observed.claim_meta("p", "t", ["reward"], 2, timeout=LONG)
    observed.check_consumption_status("p", "t")
    observed.count_samples("p")
    observed.clear_samples(["a", "b"], "p")
    assert [facts(event) for event in events] == [
        ("register", "q", 0, OK),
        ("put", "p", 2, OK),
        ("get", "p", 2, OK),
        ("link", "other", 1, OK),
        ("claim", "p", 2, OK),
        ("status", "p", 0, OK),
        ("count", "p", 0, OK),
        ("clear", "p", 2, OK),
    ]
    size = 7 * 8 + 3 * 8 + 2 * 4 + len("row 3 0") + len("row 4 0")
    assert [event.bytes for event in events] == [0, size, size, 0, 0, 0, 0, 0]
    assert all(before <= event.began <= time.monotonic() for event in events)
    assert sum(event.milliseconds + event.waited_milliseconds for event in events) > 0
    assert sum(event.milliseconds for event in events) <= (time.monotonic() - before) * 1e3


async def test_so_does_every_async_call(observed: ObservedClient) -> None:
    events = heard(observed)
    await observed.register_partition_async("q", SCHEMA)
    await observed.put_samples_async(["a", "b"], columns([3, 4]), "p")
    await observed.get_samples_async(meta_of("p", "a", "b"), ["reward"])
    await observed.link_samples_async(meta_of("p", "a"), FIELDS, "other")
    await observed.claim_meta_async("p", "t", ["reward"], 2, LONG)
    await observed.check_consumption_status_async("p", "t")
    await observed.count_samples_async("p")
    await observed.clear_samples_async(["a", "b"], "p")
    assert [event.operation.value for event in events] == [
        "register",
        "put",
        "get",
        "link",
        "claim",
        "status",
        "count",
        "clear",
    ]
    assert all(event.status is OK for event in events)
    assert (events[2].bytes, observed.totals().outstanding_bytes) == (8, 0)


async def test_a_call_that_fails_raises_as_before_and_is_counted(observed: ObservedClient) -> None:
    events = heard(observed)
    with pytest.raises(MissingRowError, match="'x'"):
        observed.get_samples(meta_of("p", "x"), ["reward"])
    with pytest.raises(MissingRowError, match="'x'"):
        await observed.get_samples_async(meta_of("p", "x"), ["reward"])
    with pytest.raises(DataPlaneError, match="'price'"):
        observed.put_samples(["a"], {"price": torch.zeros(1)}, "p")
    with pytest.raises(DataPlaneError, match="'price'"):
        await observed.put_samples_async(["a"], {"price": torch.zeros(1)}, "p")
    with pytest.raises(DataPlaneError, match="'price'"):
        observed.claim_meta("p", "t", ["price"], 1, timeout=LONG)
    with pytest.raises(DataPlaneError, match="not registered"):
        await observed.count_samples_async("nobody's")
    assert [event.operation.value for event in events] == ["get", "get", "put", "put", "claim", "count"]
    assert {event.status for event in events} == {ERROR}
    assert {event.bytes for event in events} == {0}
    totals = observed.totals()
    assert [totals.of(DataPlaneOperation(name)).errors for name in ("get", "put", "claim", "count")] == [2, 2, 1, 1]
    assert totals.outstanding_bytes == 0


async def test_a_wait_that_is_too_long_is_a_timeout(observed: ObservedClient) -> None:
    events = heard(observed)
    with pytest.raises(DataPlaneTimeout, match="0 of 1 rows"):
        observed.claim_meta("p", "t", ["reward"], 1, timeout=0.01)
    with pytest.raises(DataPlaneTimeout, match="0 of 1 rows"):
        await observed.claim_meta_async("p", "t", ["reward"], 1, 0.01)
    assert [facts(event) for event in events] == [("claim", "p", 1, TIMEOUT)] * 2
    claims = observed.totals().of(DataPlaneOperation.CLAIM)
    assert (claims.count, claims.errors, claims.timeouts) == (2, 0, 2)
    assert claims.waited_seconds >= 0.02


async def test_a_put_that_finds_no_room_is_a_timeout() -> None:
    owner = ObservedOwner(ShmOwner(MB, full_seconds=0.01))
    owner.register_partition("p", LARGE)
    events = heard(owner)
    owner.put_samples(["a"], {"big": torch.zeros(1, MB - 1000, dtype=torch.uint8)}, "p")
    with pytest.raises(DataPlaneTimeout, match="no room"):
        owner.put_samples(["b"], {"big": torch.zeros(1, MB // 2, dtype=torch.uint8)}, "p")
    with pytest.raises(DataPlaneTimeout, match="no room"):
        await owner.put_samples_async(["b"], {"big": torch.zeros(1, MB // 2, dtype=torch.uint8)}, "p")
    owner.close()
    assert [event.status for event in events] == [OK, TIMEOUT, TIMEOUT]


def test_waiting_for_rows_is_not_latency(observed: ObservedClient) -> None:
    events, before = heard(observed), time.monotonic()
    pending = observed.begin_claim("p", "t", ["reward"], 1)
    waits = time.monotonic()
    threading.Event().wait(0.05)
    there = time.monotonic()
    observed.put_samples(["a"], columns([3]), "p")
    pending.future.result(LONG)
    [claim] = [event for event in events if event.operation is DataPlaneOperation.CLAIM]
    assert claim.waited_milliseconds >= (there - waits) * 1e3
    assert claim.milliseconds <= (waits - before) * 1e3


async def test_a_claim_that_is_cancelled_makes_one_event(observed: ObservedClient) -> None:
    events = heard(observed)
    claim = asyncio.create_task(observed.claim_meta_async("p", "t", ["reward"], 1))
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert [facts(event) for event in events] == [("claim", "p", 1, TIMEOUT)]


async def test_a_put_that_is_cancelled_is_counted_as_such() -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(MemoryDataPlane):
        async def put_samples_async(self, *args: Any) -> None:
            await DataPlaneClient.put_samples_async(self, *args)

        def put_samples(self, *args: Any) -> None:
            begun.set()
            assert go.wait(LONG)
            super().put_samples(*args)

    observed = ObservedOwner(Slow())
    observed.register_partition("p", SCHEMA)
    events = heard(observed)
    put = asyncio.create_task(observed.put_samples_async(["a"], columns([3]), "p"))
    await asyncio.to_thread(begun.wait, LONG)
    put.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert [facts(event) for event in events] == [("put", "p", 1, OperationStatus.CANCELLED)]
    assert observed.count_samples("p") == 1


def test_nothing_passes_by_unmeasured_or_is_left_to_a_default() -> None:
    made_of_others = {"claim_meta", "claim_meta_async", "close_async"}
    names = {name for name in dir(DataPlaneOwner) if not name.startswith("_")}
    assert {name for name in names if getattr(ObservedOwner, name) is getattr(DataPlaneOwner, name)} == made_of_others


def test_the_controllers_client_is_counted_too(observed: ObservedClient) -> None:
    observed.put_samples(["a"], columns([3]), "p")
    events = heard(observed)
    narrow = NarrowClient(observed, frozenset({"reward"}), "controller")
    narrow.get_samples(meta_of("p", "a"), ["reward"])
    narrow.claim_meta("p", "t", ["reward"], 1, timeout=LONG)
    narrow.clear_samples(["a"], "p")
    assert [event.operation.value for event in events] == ["get", "claim", "clear"]


def test_totals_are_exact_with_many_threads() -> None:
    observed = ObservedOwner(MemoryDataPlane())
    observed.register_partition("p", SCHEMA)

    def work(worker: int) -> None:
        for number in range(50):
            observed.put_samples([f"{worker} {number}"], {"reward": torch.ones(1)}, "p")
            observed.get_samples(meta_of("p", f"{worker} {number}"), ["reward"])
            observed.clear_samples([f"{worker} {number}"], "p")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = observed.totals()
    for name in ("put", "get", "clear"):
        found = totals.of(DataPlaneOperation(name))
        assert (found.count, found.rows, found.latencies.total) == (400, 400, 400)
    assert (totals.of(DataPlaneOperation.PUT).bytes, totals.outstanding_bytes) == (1600, 0)
    assert 4 <= totals.peak_bytes <= 8 * 4


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_outstanding_bytes_are_those_put_and_not_cleared(data: st.DataObject) -> None:
    found, rows, most = ClientMeter(), dict[tuple[str, str], int](), 0
    for _ in range(data.draw(st.integers(0, 12))):
        partition = data.draw(st.sampled_from("pq"))
        if data.draw(st.booleans()):
            first, size = data.draw(st.sampled_from("abcd")), data.draw(st.integers(0, 1000))
            found.holds(partition, first, size)
            rows[partition, first] = rows.get((partition, first), 0) + size
        else:
            cleared = data.draw(st.lists(st.sampled_from("abcde")))
            found.lets_go(partition, cleared)
            rows = {key: size for key, size in rows.items() if key[0] != partition or key[1] not in cleared}
        most = max(most, sum(rows.values()))
        totals = found.totals()
        assert (totals.outstanding_bytes, totals.peak_bytes) == (sum(rows.values()), most)


def test_a_client_that_only_puts_remembers_a_limited_number_of_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "MOST_PUTS", 3)
    found = ClientMeter()
    for number in range(10):
        found.holds("p", str(number), 100)
    assert found.totals().outstanding_bytes == 300
    found.lets_go("p", ["0", "9"])
    assert found.totals().outstanding_bytes == 200


times = st.lists(st.floats(1e-6, 1800.0), min_size=1, max_size=60)


@given(times, st.sampled_from([50, 95, 99, 100]))
def test_percentiles_are_within_a_bucket_of_the_exact_ones(seconds: list[float], percent: int) -> None:
    found = Latencies.of(seconds).percentile(percent)
    exact = sorted(seconds)[-(-len(seconds) * percent // 100) - 1]
    assert found == pytest.approx(exact, rel=0.0455)


@given(times, times)
def test_latencies_of_two_clients_add_up(one: list[float], other: list[float]) -> None:
    assert Latencies.of(one) + Latencies.of(other) == Latencies.of(one + other)


def test_times_out_of_range_count_at_the_ends() -> None:
    found = Latencies.of([0.0, 1e-9, 1e9])
    assert found.total == 3
    assert found.percentile(100) == pytest.approx(2147, rel=0.05)
    assert Latencies().percentile(50) is None


def test_bytes_of_every_kind_of_column() -> None:
    made = {
        "tokens": JaggedColumn.from_rows([torch.arange(3, dtype=torch.int32), torch.arange(0, dtype=torch.int32)]),
        "image": torch.zeros(2, 3, 5),
        "text": ObjectColumn(("four", None)),
        "plain": ObjectColumn(("four", "")),
    }
    assert meter.columns_bytes(made) == (3 * 4 + 3 * 8) + 2 * 15 * 4 + (4 + 8) + 4


def test_a_setting_turns_it_off() -> None:
    plain = open_data_plane(DataPlaneConfig(observe=False))
    assert type(plain) is MemoryDataPlane
    assert plain.use() is None
    watched = open_data_plane(DataPlaneConfig())
    watched.register_partition("p", SCHEMA)
    use = watched.use()
    assert use is not None
    assert [each.operation for each in use.totals.operations] == [DataPlaneOperation.REGISTER]


def test_clients_of_other_processes_keep_events_if_the_owner_says_so() -> None:
    owner = open_data_plane(DataPlaneConfig(adapter="shm", capacity_gb=0.01), keeps_events=True)
    address = owner.address()
    assert isinstance(address, ObservedAddress)
    client = connect(address)
    client.register_partition("p", SCHEMA)
    client.put_samples(["a"], columns([3]), "p")
    use = client.use()
    assert use is not None
    assert [event.operation.value for event in use.events] == ["register", "put"]
    again = client.use()
    assert again is not None
    assert (again.events, again.totals) == ((), use.totals)
    own = owner.use()
    assert own is not None
    assert own.totals.operations == ()
    client.close()
    owner.close()

"""Metrics of the data plane, step by step, from the clients of all processes; and its operations on the timeline."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.observing.client import ObservedOwner
from penstock.data_plane.observing.events import DataPlaneEvent, DataPlaneOperation, OperationStatus
from penstock.data_plane.observing.latencies import Latencies
from penstock.data_plane.observing.spans import OperationSpans
from penstock.data_plane.observing.step_use import StepUse
from penstock.data_plane.observing.totals import ClientTotals, ClientUse, OperationTotals
from penstock.data_plane.observing.watched import watched_use
from penstock.data_plane.opening import connect
from penstock.errors import MissingRowError
from penstock.observe.timeline import Timeline
from tests.data_plane.support import SCHEMA, columns, meta_of


@pytest.fixture
def own() -> ObservedOwner:
    made = ObservedOwner(MemoryDataPlane())
    made.register_partition("p", SCHEMA)
    return made


def use(count: int, client: str = "trainer", *, size: int = 10, seconds: float = 0.001) -> ClientUse:
    """A client that has made so many gets."""
    times = Latencies.of([seconds] * count)
    gets = OperationTotals(DataPlaneOperation.GET, count, count, size * count, seconds * count, latencies=times)
    return ClientUse(ClientTotals((gets,)), client)


def test_a_step_has_what_is_new_in_it(own: ObservedOwner) -> None:
    steps = StepUse(own)
    own.put_samples(["a", "b"], {"reward": torch.ones(2)}, "p")
    first = steps.of_step()
    assert (first["data_plane/put/count"], first["data_plane/put/bytes"]) == (1.0, 8.0)
    assert first["data_plane/register/count"] == 1.0
    assert first["data_plane/time_s"] > first["data_plane/put/time_s"] > 0
    assert 0 < first["data_plane/put/p50_ms"] <= first["data_plane/put/p95_ms"] <= first["data_plane/put/p99_ms"]
    assert (first["data_plane/outstanding_bytes"], first["data_plane/peak_bytes"]) == (8.0, 8.0)
    own.put_samples(["c"], {"reward": torch.ones(1)}, "p")
    own.clear_samples(["a", "b"], "p")
    with pytest.raises(MissingRowError):
        own.get_samples(meta_of("p", "a"), ["reward"])
    second = steps.of_step()
    assert (second["data_plane/put/count"], second["data_plane/put/bytes"]) == (1.0, 4.0)
    assert (second["data_plane/get/count"], second["data_plane/get/errors"]) == (1.0, 1.0)
    assert (second["data_plane/outstanding_bytes"], second["data_plane/peak_bytes"]) == (4.0, 12.0)
    assert not [name for name in second if "register" in name or "timeouts" in name or "events_" in name]
    third = steps.of_step()
    assert third == {
        "data_plane/time_s": 0.0,
        "data_plane/outstanding_bytes": 4.0,
        "data_plane/peak_bytes": 12.0,
    }


def test_other_processes_are_added(own: ObservedOwner) -> None:
    steps = StepUse(own)
    steps.heard("trainer", use(2))
    assert steps.of_step()["data_plane/get/count"] == 2.0
    steps.heard("trainer", use(5, seconds=0.004))
    steps.heard("row worker", use(1, "row worker", size=100))
    found = steps.of_step()
    assert (found["data_plane/get/count"], found["data_plane/get/bytes"]) == (4.0, 130.0)
    assert found["data_plane/get/p99_ms"] == pytest.approx(4.0, rel=0.05)
    steps.heard("trainer", None)
    assert "data_plane/get/count" not in steps.of_step()


def test_a_process_that_begins_anew_takes_nothing_away(own: ObservedOwner) -> None:
    steps = StepUse(own)
    steps.heard("row worker", use(7, "first"))
    steps.of_step()
    steps.heard("row worker", use(2, "second"))
    assert steps.of_step()["data_plane/get/count"] == 2.0
    steps.heard("row worker", use(3, "second"))
    assert steps.of_step()["data_plane/get/count"] == 1.0


def test_a_process_that_begins_anew_may_do_more_than_the_one_before(own: ObservedOwner) -> None:
    with closing(ShmOwner(1_000_000)) as owner:
        owner.register_partition("p", SCHEMA)
        address, steps = ObservedOwner(owner).address(), StepUse(own)
        steps.of_step()
        for puts in (1, 3):
            client = connect(address)
            for number in range(puts):
                client.put_samples([f"{puts}-{number}"], {"reward": torch.ones(1)}, "p")
            steps.heard("row worker", client.use())
            found = steps.of_step()
            assert (found["data_plane/put/count"], found["data_plane/put/bytes"]) == (puts, 4.0 * puts)
            client.close()


async def test_the_row_worker_is_asked_without_waiting_for_it(own: ObservedOwner) -> None:
    answers: asyncio.Queue[ClientUse | None] = asyncio.Queue()
    asked = 0

    async def ask() -> ClientUse | None:
        nonlocal asked
        asked += 1
        return await answers.get()

    steps = StepUse(own, ask_row_worker=ask)
    for _ in range(3):
        assert "data_plane/get/count" not in steps.of_step()
        await asyncio.sleep(0)
    assert asked == 1
    answers.put_nowait(use(4))
    while answers.qsize():  # noqa: ASYNC110 - another task takes it
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert steps.of_step()["data_plane/get/count"] == 4.0


def test_what_is_not_observed_has_no_metrics() -> None:
    assert StepUse(MemoryDataPlane()).of_step() == {}
    assert watched_use(MemoryDataPlane(), None) is None


def spans_in(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Track, name and the rest of every span of the data plane."""
    lines = json.loads(path.read_text())
    names = {(line["pid"], line["tid"]): line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    [process] = [line["pid"] for line in lines if line["args"].get("name") == "data plane"]
    return [
        (names[line["pid"], line["tid"]], line["name"], line)
        for line in lines
        if line["pid"] == process and line["ph"] == "X"
    ]


def test_operations_are_spans_of_the_timeline(own: ObservedOwner, tmp_path: Path) -> None:
    timeline = Timeline.to_file(tmp_path / "trace.json")
    steps = watched_use(own, timeline)
    assert steps is not None
    before = timeline.now()
    own.put_samples(["a"], columns([3]), "p")
    with pytest.raises(MissingRowError):
        own.get_samples(meta_of("p", "x"), ["reward"])
    after = timeline.now()
    trained = DataPlaneEvent(DataPlaneOperation.GET, "p", 4, 99, 2.0, OperationStatus.OK, 0.0, time.monotonic())
    steps.heard("trainer", ClientUse(use(1).totals, "trainer", (trained,)))
    steps.of_step()
    timeline.close()
    put, get, other = spans_in(tmp_path / "trace.json")
    assert (put[0], put[1], put[2]["args"]["rows"]) == ("put", "put", 1)
    assert before * 1e6 - 1 <= put[2]["ts"] <= put[2]["ts"] + put[2]["dur"] <= after * 1e6 + 1
    assert (get[0], get[2]["args"]["status"]) == ("get", "error")
    assert (other[0], other[1], other[2]["args"]["bytes"]) == ("trainer: get", "get", 99)
    assert other[2]["dur"] == pytest.approx(2000.0, abs=1)
    counters = [line for line in json.loads((tmp_path / "trace.json").read_text()) if line["ph"] == "C"]
    assert [line["args"] for line in counters] == [{"bytes": 3 * 8 + 2 * 8 + 4 + len("row 3 0")}]


def test_operations_that_overlap_are_next_to_each_other(tmp_path: Path) -> None:
    timeline = Timeline.to_file(tmp_path / "trace.json")
    spans, now = OperationSpans(timeline), time.monotonic()

    def put(began: float, seconds: float) -> DataPlaneEvent:
        return DataPlaneEvent(DataPlaneOperation.PUT, "p", 1, 8, seconds * 1e3, OperationStatus.OK, 0.0, now + began)

    for began, seconds in ((0.0, 1.0), (0.5, 1.0), (1.2, 1.0), (1.6, 1.0)):
        spans.hear(put(began, seconds))
    threads = [threading.Thread(target=spans.hear, args=(put(3.0, 1.0),)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    drawn = spans_in(tmp_path / "trace.json")
    assert [track for track, _, _ in drawn[:4]] == ["put", "put 2", "put", "put 2"]
    assert [span["dur"] for _, _, span in drawn[:4]] == pytest.approx([1e6] * 4, abs=1)
    assert len(drawn) == 24
    assert {track for track, _, _ in drawn} == {"put", *(f"put {number}" for number in range(2, 9))}

"""The user's function gets every event, and whatever it does, operations go on as without it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from penstock.config.models import DataPlaneConfig
from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.observing import callback
from penstock.data_plane.observing.callback import EventCallback
from penstock.data_plane.observing.events import DataPlaneEvent, DataPlaneOperation, OperationStatus
from penstock.data_plane.observing.totals import ClientTotals
from penstock.data_plane.opening import open_data_plane
from penstock.errors import ConfigError
from penstock.runtime.wire.encoder import encode
from tests.data_plane.support import SCHEMA

LONG = 60.0
ROOT = Path(__file__).parents[2]
EVENT = DataPlaneEvent(DataPlaneOperation.PUT, "p", 1, 8, 0.5, OperationStatus.OK, 0.0, 1.0)

_hear: Callable[[DataPlaneEvent], None] = lambda event: None  # noqa: E731


def on_event(event: DataPlaneEvent) -> None:
    """What `data_plane.on_event` names in these tests."""
    _hear(event)


@pytest.fixture
def hears(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[DataPlaneEvent], None]], None]:
    """Sets what `on_event` does."""
    return lambda function: monkeypatch.setitem(globals(), "_hear", function)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is not stuck is waited for, however slow the machine."""
    monkeypatch.setattr(callback, "CLOSE_SECONDS", LONG)


@pytest.fixture
def plane() -> Iterator[DataPlaneOwner]:
    made = open_data_plane(DataPlaneConfig(on_event=f"{__name__}:on_event"))
    made.register_partition("p", SCHEMA)
    yield made
    made.close()


def put(plane: DataPlaneOwner, count: int) -> None:
    for number in range(count):
        plane.put_samples([f"s{number}"], {"reward": torch.ones(1)}, "p")


def totals(plane: DataPlaneOwner) -> ClientTotals:
    use = plane.use()
    assert use is not None
    return use.totals


def test_it_gets_every_event_in_order(
    plane: DataPlaneOwner, hears: Callable[[Callable[[DataPlaneEvent], None]], None]
) -> None:
    events: list[DataPlaneEvent] = []
    hears(events.append)
    put(plane, 3)
    plane.clear_samples(["s0", "s1"], "p")
    plane.close()
    assert [(event.operation.value, event.rows) for event in events[-4:]] == [("put", 1)] * 3 + [("clear", 2)]
    assert {event.status for event in events} == {OperationStatus.OK}


def test_one_that_raises_fails_nothing_and_is_counted(
    plane: DataPlaneOwner,
    hears: Callable[[Callable[[DataPlaneEvent], None]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(event: DataPlaneEvent) -> None:
        raise SystemExit(f"no good: {event.operation}")

    hears(fail)
    put(plane, 3)
    assert plane.count_samples("p") == 3
    plane.close()
    assert totals(plane).events_failed >= 4
    assert totals(plane).of(DataPlaneOperation.PUT).errors == 0
    warnings = [record.getMessage() for record in caplog.records if record.name == callback.__name__]
    assert len(warnings) == 1
    assert "data_plane.on_event" in warnings[0]
    assert "no good" in warnings[0]


def test_one_that_hangs_holds_nothing_up_and_what_it_misses_is_counted(
    plane: DataPlaneOwner,
    hears: Callable[[Callable[[DataPlaneEvent], None]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callback, "MOST_WAITING", 5)
    monkeypatch.setattr(callback, "CLOSE_SECONDS", 0.05)
    begun, go = threading.Event(), threading.Event()

    def hang(event: DataPlaneEvent) -> None:
        if event.operation is DataPlaneOperation.PUT:
            begun.set()
            go.wait(LONG)

    hears(hang)
    put(plane, 1)
    assert begun.wait(LONG)
    put(plane, 20)
    assert plane.count_samples("p") == 20
    assert totals(plane).events_dropped == 20 + 1 - 5
    plane.close()
    assert totals(plane).events_dropped == 20 + 1
    go.set()


def test_every_event_is_called_with_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback, "MOST_WAITING", 50)
    seen: list[DataPlaneEvent] = []
    made = EventCallback(seen.append, "here")
    threads = [threading.Thread(target=lambda: [made.hear(EVENT) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.close()
    made.close()
    assert len(seen) + made.dropped == 2000
    made.hear(EVENT)
    assert len(seen) + made.dropped == 2001


class Meddled(SimpleQueue[Any]):
    """A queue in which something else happens first: `before_put`, and `after_get` of an event."""

    before_put: Callable[[], object] = staticmethod(lambda: None)
    after_get: Callable[[], object] = staticmethod(lambda: None)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item is not None:
            self.before_put()
        super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get()
        if item is not None:
            self.after_get()
        return item


def test_an_event_that_comes_while_it_is_closed_is_called_with_or_dropped() -> None:
    seen: list[DataPlaneEvent] = []
    made = EventCallback(seen.append, "here")
    closing = threading.Thread(target=made.close)
    queue = made._waiting = Meddled()

    def close() -> None:
        closing.start()
        closing.join(0.05)

    queue.before_put = close
    made.hear(EVENT)
    closing.join(LONG)
    assert not closing.is_alive()
    assert len(seen) + made.dropped == 1


def test_an_event_that_is_taken_too_late_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback, "CLOSE_SECONDS", 0.0)
    seen: list[DataPlaneEvent] = []
    made = EventCallback(seen.append, "here")
    taken, go = threading.Event(), threading.Event()
    queue = made._waiting = Meddled()
    queue.after_get = lambda: (taken.set(), go.wait(LONG))
    made.hear(EVENT)
    assert taken.wait(LONG)
    made.close()
    go.set()
    assert made._thread is not None
    made._thread.join(LONG)
    assert (len(seen), made.dropped) == (0, 1)


def test_an_operation_succeeds_where_no_thread_can_be_started(
    hears: Callable[[Callable[[DataPlaneEvent], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[DataPlaneEvent] = []
    hears(events.append)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    plane = open_data_plane(DataPlaneConfig(on_event=f"{__name__}:on_event"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        plane.register_partition("p", SCHEMA)
        put(plane, 1)
    assert totals(plane).events_dropped == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.name == callback.__name__]
    assert warning.startswith("data_plane.on_event: ")
    assert "is not called: RuntimeError: can't start new thread" in warning
    assert plane.count_samples("p") == 1
    plane.close()
    assert [event.operation for event in events] == [DataPlaneOperation.COUNT]
    assert totals(plane).events_dropped == 2


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("no_such_module:f", r"data_plane\.on_event: module 'no_such_module' cannot be imported"),
        (f"{__name__}:on_evnt", r"data_plane\.on_event: .* has no callable 'on_evnt'; did you mean on_event\?"),
    ],
)
def test_one_that_is_not_there_is_refused_before_anything_is_opened(path: str, match: str) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConfigError, match=match):
        open_data_plane(DataPlaneConfig(adapter="shm", capacity_gb=0.01, on_event=path))
    assert {thread.name for thread in threading.enumerate()} <= before


CHILD = """
import sys
from penstock.data_plane.opening import connect
from penstock.runtime.wire.decoder import decode
from tests.data_plane.support import SCHEMA, columns

plane = connect(decode(bytes.fromhex(sys.argv[1])))
plane.put_samples(["a", "b"], columns([3, 4]), "p")
plane.close()
"""


def print_event(event: DataPlaneEvent) -> None:
    """For another process."""
    sys.stdout.write(f"{event.operation} {event.partition_id} {event.rows} {event.status}\n")


@pytest.mark.long
def test_it_is_called_in_every_process_that_makes_events() -> None:
    made = open_data_plane(DataPlaneConfig(adapter="shm", capacity_gb=0.01, on_event=f"{__name__}:print_event"))
    made.register_partition("p", SCHEMA)
    command = [sys.executable, "-c", CHILD, encode(made.address()).head.hex()]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert child.stdout.splitlines() == ["put p 2 ok"]
    made.close()

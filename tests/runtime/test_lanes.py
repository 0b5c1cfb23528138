from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.runtime.lanes import Lanes


@pytest.fixture(params=[1, 2, 3])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    made = Lanes("test", request.param)
    yield made
    made.close()


def test_results_come_in_the_order_of_the_items(lanes: Lanes) -> None:
    assert list(lanes.map(lambda number: number * number, range(20))) == [number * number for number in range(20)]


def test_two_lanes_work_at_the_same_time() -> None:
    lanes, both = Lanes("test", 2), threading.Barrier(2)
    assert len(list(lanes.map(lambda _: both.wait(timeout=10), range(4)))) == 4
    lanes.close()


def test_one_lane_works_where_it_is_asked() -> None:
    assert list(Lanes("test").map(lambda _: threading.get_ident(), [0])) == [threading.get_ident()]


def test_an_error_is_raised_when_what_has_begun_has_ended() -> None:
    lanes, ended = Lanes("test", 2), []
    go = threading.Event()

    def piece(number: int) -> None:
        if number == 0:
            go.set()
            raise ValueError("no such piece")
        go.wait(timeout=10)
        ended.append(number)

    with pytest.raises(ValueError, match="no such piece"):
        list(lanes.map(piece, range(8)))
    assert ended == [1]
    assert list(lanes.map(str, range(3))) == ["0", "1", "2"]
    lanes.close()


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    lanes = Lanes("test", 3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    lanes.close()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()

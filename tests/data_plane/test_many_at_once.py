"""Producers and consumers in processes of their own: every row goes to a task once, and none is lost, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.store.messages import WhenFull
from tests.data_plane.children import Child, Children, children, heard, kill, tell
from tests.data_plane.opened import REACHABLE
from tests.data_plane.support import SCHEMA, columns

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
LONG = 120.0
ROOMY, TIGHT = 50_000_000, 200_000


@pytest.fixture(params=REACHABLE)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def owner_of(way: str, stack: ExitStack, capacity: int = ROOMY, when_full: WhenFull = WhenFull.WAIT) -> DataPlaneOwner:
    owner = REACHABLE[way](stack, capacity, when_full)
    owner.register_partition("p", SCHEMA)
    return owner


PRODUCE = """
import time
name, groups, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
refused = 0
for number in range(groups):
    ids = [f"{name}-{number}_g{row}" for row in range(size)]
    made = columns([100 + number] * size, number)
    del made["reward"]
    while True:
        try:
            plane.put_samples(ids, made, "p")
            break
        except DataPlaneError as error:
            assert "is full" in str(error), error
            refused += 1
            if refused == 1:
                say("refused")
            time.sleep(0.001)  # as anybody would who is refused
say(refused)
"""
SCORE = """
count, done = int(sys.argv[2]), []
while len(done) < count:
    meta = plane.claim_meta("p", "score", ["tokens", "text"], 2, timeout=120)
    batch = plane.get_samples(meta, ["tokens"])
    rewards = [float(batch.jagged("tokens").row(row).sum()) for row in range(len(meta))]
    plane.put_samples(meta.sample_ids, {"reward": torch.tensor(rewards)}, "p")
    done += meta.sample_ids
say(done)
"""
TRAIN = """
count, done, wrong = int(sys.argv[2]), [], 0
hear()
while len(done) < count:
    meta = plane.claim_meta("p", "train", FIELDS, 4, timeout=120)
    batch = plane.get_samples(meta, FIELDS)
    for row, sample in enumerate(meta.sample_ids):
        number = int(sample.split("-")[1].split("_")[0])
        tokens = list(range(number, 100 + 2 * number))
        wrong += batch.jagged("tokens").row(row).tolist() != tokens
        wrong += batch.tensor("reward")[row].item() != sum(tokens)
        wrong += batch.objects("text").items[row] != f"row {100 + number} {number}"
        wrong += meta.sequence_lengths[row] != 100 + number
    del batch
    plane.clear_samples(meta.sample_ids, "p")
    done += meta.sample_ids
say([done, wrong])
"""


@pytest.mark.parametrize("when_full", WhenFull, ids=lambda each: str(each.value))
def test_every_row_goes_through_every_stage_once(way: str, stack: ExitStack, when_full: WhenFull) -> None:
    """Two processes write rows, two add a field, two read and clear; a third of the rows fits, so all have to wait."""
    groups, size = 60, 4
    rows = 2 * groups * size
    owner = owner_of(way, stack, TIGHT, when_full)
    started = stack.enter_context(children(owner.address()))
    producers = [started.start(PRODUCE, f"n{number}", str(groups), str(size)) for number in range(2)]
    scorers = [started.start(SCORE, str(rows // 2)) for _ in range(2)]
    trainers = [started.start(TRAIN, str(rows // 2)) for _ in range(2)]
    if when_full is WhenFull.REFUSE:
        assert [heard(child) for child in producers] == ["refused"] * 2
    else:
        until(lambda: owner.is_waited_for)
    for child in trainers:
        tell(child)
    trained = [heard(child) for child in trainers]
    refused = [heard(child) for child in producers]
    assert all(refused) == (when_full is WhenFull.REFUSE)
    expected = {f"n{n}-{number}_g{row}" for n in range(2) for number in range(groups) for row in range(size)}
    for done in ([heard(child) for child in scorers], [done for done, _ in trained]):
        counted = Counter(sample for each in done for sample in each)
        assert set(counted.values()) == {1}
        assert counted.keys() == expected
    assert [wrong for _, wrong in trained] == [0, 0]
    assert owner.count_samples("p") == 0


CLAIM = """
while True:
    pending = plane.begin_claim("p", "t", ["reward"], 2)
    plane.count_samples("p")  # answered after the claim has arrived
    say("waits")
    say(pending.future.result().sample_ids)
    hear()
"""


def until(reached: Callable[[], bool]) -> None:
    event, end = threading.Event(), time.monotonic() + LONG
    while not reached():
        assert time.monotonic() < end
        event.wait(0.005)


def put(owner: DataPlaneOwner, *ids: str) -> None:
    owner.put_samples(ids, columns([3] * len(ids)), "p")


def claimed(owner: DataPlaneOwner) -> set[str]:
    return {sample for sample, taken in owner.check_consumption_status("p", "t").items() if taken}


def begun(started: Children) -> Child:
    child = started.start(CLAIM)
    assert heard(child) == "waits"
    return child


def test_rows_that_a_killed_consumer_has_claimed_stay_claimed(way: str, stack: ExitStack) -> None:
    """It may have done with them whatever it wanted: nobody else gets them. Whoever watches sees them by the status."""
    owner = owner_of(way, stack)
    started = stack.enter_context(children(owner.address()))
    first, second = begun(started), begun(started)
    put(owner, "a", "b")
    put(owner, "c", "d")
    have = {child.pid: heard(child) for child in (first, second)}
    assert sorted(have.values()) == [["a", "b"], ["c", "d"]]
    kill(first)
    tell(second)
    assert heard(second) == "waits"
    put(owner, "e", "f")
    assert heard(second) == ["e", "f"]
    assert claimed(owner) == set("abcdef")
    owner.clear_samples(have[first.pid], "p")
    put(owner, *have[first.pid])
    tell(second)
    assert heard(second) == "waits"
    assert heard(second) == have[first.pid], "put anew, they are rows like any others"


def test_a_claim_of_a_consumer_that_is_killed_while_it_waits_claims_nothing(way: str, stack: ExitStack) -> None:
    owner = owner_of(way, stack)
    started = stack.enter_context(children(owner.address()))
    waiting = [begun(started) for _ in range(2)]
    put(owner, "a")
    for child in waiting:
        kill(child)
    put(owner, "b")
    assert owner.claim_meta("p", "t", ["reward"], 2, timeout=LONG).sample_ids == ("a", "b")


def test_rows_that_a_killed_consumer_never_took_go_to_another(way: str, stack: ExitStack) -> None:
    """It stands still when its rows are granted, and is killed before it has seen them."""
    owner = owner_of(way, stack)
    started = stack.enter_context(children(owner.address()))
    standing = begun(started)
    put(owner, "a")
    standing.send_signal(signal.SIGSTOP)
    os.waitpid(standing.pid, os.WUNTRACED)
    put(owner, "b")
    assert claimed(owner) == {"a", "b"}
    kill(standing)
    assert owner.claim_meta("p", "t", ["reward"], 2, timeout=LONG).sample_ids == ("a", "b")
    assert claimed(owner) == {"a", "b"}


def test_a_consumer_killed_again_and_again_costs_no_row(way: str, stack: ExitStack) -> None:
    """Killed at any moment: a row is with the survivor, or with one that was killed, or still there; never with two."""
    owner = owner_of(way, stack)
    owner.register_partition("seen", SCHEMA)
    started = stack.enter_context(children(owner.address()))
    survivor = started.start(
        """
done = []
say("begins")
while True:
    meta = plane.claim_meta("p", "t", ["reward"], 1)
    if meta.sample_ids[0] == "last":
        break
    plane.clear_samples(meta.sample_ids, "p")
    done += meta.sample_ids
say(done)
"""
    )
    assert heard(survivor) == "begins"
    victims = [
        started.start(
            """
say("begins")
while True:
    meta = plane.claim_meta("p", "t", ["reward"], 1)
    plane.link_samples(meta_of("p", *meta.sample_ids), FIELDS, "seen")
    plane.clear_samples(meta.sample_ids, "p")
"""
        )
        for _ in range(3)
    ]
    rows, put_so_far = [f"r{number}" for number in range(600)], 0
    for victim in victims:
        assert heard(victim) == "begins"
    for victim in victims:
        for sample in rows[put_so_far : put_so_far + 200]:
            put(owner, sample)
        put_so_far += 200
        kill(victim)
    # Rows that nobody has claimed go to the survivor, the oldest first; then it ends.
    put(owner, "last")
    done = heard(survivor)
    seen = set(owner.check_consumption_status("seen", "nobody"))
    there = set(owner.check_consumption_status("p", "t")) - {"last"}
    assert len(done) == len(set(done))
    assert not set(done) & (seen | there), "no row has two owners"
    assert set(done) | seen | there == set(rows), "no row is lost"
    assert len(there) <= len(victims), "each dies with one row at most"

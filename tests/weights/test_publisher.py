"""A trainer's side of weight sync: what is published can be read, whole, for as long as it has to be."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.runtime import copying
from penstock.weights.plan import transport_of
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import InProcessEndpoint, SharedMemoryEndpoint, WeightPublication, WeightSite
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of
from penstock.weights.transports.opening import open_weights

HERE = site_of()
ELSEWHERE = replace(HERE, process=HERE.process + 1)
"""Another process of this machine; reading for it happens here, by the same means."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher()
    yield publisher
    publisher.close()


def weights(value: float = 0.0, size: int = 6) -> PolicyWeights:
    return PolicyWeights.given([("w", torch.full((size,), value)), ("v", torch.full((2, 3), value + 0.5))])


def read(publication: WeightPublication, site: WeightSite = ELSEWHERE) -> dict[str, Tensor]:
    """The tensors, copied."""
    opened = open_weights(publication, site)
    tensors = {name: tensor.clone() for name, tensor in opened.tensors()}
    opened.close()
    return tensors


def memories() -> int:
    """How many pieces of shared memory this process has for weights."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if "penstock-weights" in os.readlink(descriptor):
                found.add(descriptor.stat().st_ino)
    return len(found)


def values(publication: WeightPublication, site: WeightSite = ELSEWHERE) -> set[float]:
    return set(read(publication, site)["w"].tolist())


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([HERE, ELSEWHERE]),
)
def test_what_is_read_is_what_was_published(kinds: list[tuple[torch.dtype, list[int], bool]], site: WeightSite) -> None:
    torch.manual_seed(len(kinds))
    tensors = {
        f"w{i}": (torch.randn(shape).mT if strided and len(shape) > 1 else torch.randn(shape)).to(dtype)
        for i, (dtype, shape, strided) in enumerate(kinds)
    }
    publisher = WeightPublisher()
    found = read(publisher.publish(3, PolicyWeights.given(tensors.items()), [site]), site)
    publisher.close()
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_weights_that_several_threads_copy_arrive_whole(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_threads", lambda: 4)
    torch.manual_seed(0)
    sizes = [3_000_001, 1, 7, 0, 1_048_576, 513, 2_000_000]
    tensors = {f"w{number}": torch.randn(size) for number, size in enumerate(sizes)}
    for _ in range(2):  # the second one into memory that has held the first
        publication = publisher.publish(1, PolicyWeights.given(tensors.items()), [ELSEWHERE])
        found = read(publication)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        publisher.release(publication)
        for tensor in tensors.values():
            tensor.neg_()


def test_only_what_somebody_reads_is_published(publisher: WeightPublisher) -> None:
    for sites, kinds in (
        ([], [InProcessEndpoint]),
        ([HERE, HERE], [InProcessEndpoint]),
        ([ELSEWHERE], [SharedMemoryEndpoint]),
        ([HERE, ELSEWHERE], [InProcessEndpoint, SharedMemoryEndpoint]),
    ):
        publication = publisher.publish(1, weights(), sites)
        assert [type(endpoint) for endpoint in publication.endpoints] == kinds


def test_receivers_in_the_process_read_the_trainers_own_tensors(publisher: WeightPublisher) -> None:
    tensor = torch.ones(3)
    publication = publisher.publish(1, PolicyWeights.given([("w", tensor)]), [HERE])
    ((_, found),) = open_weights(publication, HERE).tensors()
    assert found.data_ptr() == tensor.data_ptr()


def test_weights_are_read_once_whoever_receives_them(publisher: WeightPublisher) -> None:
    reads = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        reads.append("w")
        yield "w", torch.ones(4)

    merged = PolicyWeights((("w", "float32", (4,)),), tensors, torch.device("cpu"), computed=True)
    for sites in ([HERE, HERE], [HERE, ELSEWHERE], [ELSEWHERE, ELSEWHERE]):
        publication = publisher.publish(1, merged, sites)
        for site in sites:
            assert torch.equal(read(publication, site)["w"], torch.ones(4))
        assert reads == ["w"], sites
        reads.clear()


def test_without_room_for_merged_weights_they_are_merged_as_they_are_read(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weights.publisher.free_bytes", lambda device: 0)
    made = []
    merged = replace(weights(2.0), computed=True, tensors=lambda: (made.append(1), weights(2.0).tensors())[1])
    publication = publisher.publish(1, merged, [HERE])
    assert made == []
    assert values(publication, HERE) == {2.0}


def test_a_slow_reader_neither_holds_up_the_next_version_nor_sees_it(publisher: WeightPublisher) -> None:
    first = publisher.publish(1, weights(1.0), [ELSEWHERE])
    slow = open_weights(first, ELSEWHERE)
    second = publisher.publish(2, weights(2.0), [ELSEWHERE])
    assert {float(number) for _, tensor in slow.tensors() for number in tensor.flatten()} == {1.0, 1.5}
    assert values(first) == {1.0}
    assert values(second) == {2.0}
    slow.close()


def test_memory_that_may_still_be_read_is_not_written_again(publisher: WeightPublisher) -> None:
    first = publisher.publish(1, weights(1.0), [ELSEWHERE])
    late = open_weights(first, ELSEWHERE)
    publisher.release(first, still_read=True)
    for version in (2, 3, 4):
        publisher.release(publisher.publish(version, weights(float(version)), [ELSEWHERE]))
    assert {float(number) for _, tensor in late.tensors() for number in tensor.flatten()} == {1.0, 1.5}
    late.close()


def test_memory_that_may_still_be_read_is_freed_when_that_is_over_and_not_before(publisher: WeightPublisher) -> None:
    before = memories()
    first = publisher.publish(1, weights(1.0), [ELSEWHERE, HERE])
    publisher.release(first, still_read=True)
    publisher.release(first, still_read=True)
    for version in (2, 3, 4):
        publisher.release(publisher.publish(version, weights(float(version)), [ELSEWHERE]))
    assert values(first) == {1.0}, "one that opens it only now finds it, too"
    assert memories() == before + 2
    with pytest.raises(WeightSyncError, match="no longer there"):
        open_weights(first, HERE)
    publisher.release(first)
    assert memories() == before + 1, "it is freed, and the memory that is written again stays"
    with pytest.raises(WeightSyncError, match="no longer there"):
        open_weights(first, ELSEWHERE)


def test_memory_that_may_still_be_read_is_freed_at_the_end() -> None:
    before, publisher = memories(), WeightPublisher()
    first = publisher.publish(1, weights(), [ELSEWHERE])
    publisher.release(first, still_read=True)
    publisher.close()
    publisher.release(first)
    assert memories() == before


def test_released_memory_is_used_for_the_next_version(publisher: WeightPublisher) -> None:
    addresses = set()
    for version in range(5):
        publication = publisher.publish(version, weights(float(version)), [ELSEWHERE])
        assert values(publication) == {float(version)}
        addresses.add(publication.endpoints)
        publisher.release(publication)
        publisher.release(publication)
    assert len(addresses) == 1


@pytest.mark.parametrize("site", [HERE, ELSEWHERE])
def test_at_most_two_publications_are_alive(publisher: WeightPublisher, site: WeightSite) -> None:
    before = memories()
    alive = [publisher.publish(version, weights(float(version)), [site]) for version in range(4)]
    assert memories() <= before + 2
    assert [values(publication, site) for publication in alive[2:]] == [{2.0}, {3.0}]
    for publication in alive[:2]:
        with pytest.raises(WeightSyncError, match="no longer there"):
            open_weights(publication, site)


def test_closing_leaves_nothing() -> None:
    before = memories()
    publisher = WeightPublisher()
    kept = publisher.publish(1, weights(), [ELSEWHERE, HERE])
    publisher.release(publisher.publish(2, weights(), [ELSEWHERE, HERE]))
    publisher.close()
    publisher.release(kept)
    assert memories() == before
    for site in (HERE, ELSEWHERE):
        with pytest.raises(WeightSyncError, match="no longer there"):
            open_weights(kept, site)


def test_a_larger_version_fits_into_memory_that_grows(publisher: WeightPublisher) -> None:
    small = publisher.publish(1, weights(1.0, size=8), [ELSEWHERE])
    publisher.release(small)
    large = publisher.publish(2, weights(2.0, size=1_000_000), [ELSEWHERE])
    assert len(read(large)["w"]) == 1_000_000
    assert values(large) == {2.0}


def test_weights_that_break_while_they_are_read_leave_the_publisher_usable(publisher: WeightPublisher) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.ones(6)
        raise RuntimeError("out of memory")

    before = memories()
    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish(1, replace(weights(), tensors=broken), [ELSEWHERE])
    assert memories() == before
    assert values(publisher.publish(2, weights(2.0), [ELSEWHERE])) == {2.0}


def test_a_manifest_that_promises_more_than_there_is_is_refused(publisher: WeightPublisher) -> None:
    publication = publisher.publish(1, weights(), [ELSEWHERE])
    larger = publisher.publish(2, weights(size=100_000), [HERE]).manifest
    with pytest.raises(WeightSyncError, match="smaller than their manifest"):
        open_weights(replace(publication, manifest=larger), ELSEWHERE)


def test_releases_from_another_thread_meet_publishing(publisher: WeightPublisher) -> None:
    """What is alive is always whole, and its memory bounded, however releases and publications interleave."""
    before = memories()
    published: list[WeightPublication] = []
    ended = threading.Event()

    def release() -> None:
        while not (ended.is_set() and not published):
            if published:
                publisher.release(published.pop())

    thread = threading.Thread(target=release)
    thread.start()
    for version in range(200):
        publication = publisher.publish(version, weights(float(version)), [ELSEWHERE])
        assert values(publication) == {float(version)}
        published.append(publication)
    ended.set()
    thread.join()
    assert memories() <= before + 2


def test_a_receiver_elsewhere_cannot_read_what_was_published_for_this_process(publisher: WeightPublisher) -> None:
    publication = publisher.publish(1, weights(), [HERE])
    assert [transport_of(endpoint).value for endpoint in publication.endpoints] == ["in_process"]
    with pytest.raises(WeightSyncError, match="published through in_process; publish them for its site"):
        open_weights(publication, ELSEWHERE)


def test_a_publication_that_is_being_written_when_its_trainer_is_closed_leaves_nothing() -> None:
    publisher, before = WeightPublisher(), memories()

    def closing() -> Iterator[tuple[str, Tensor]]:
        publisher.close()
        return weights().tensors()

    with pytest.raises(WeightSyncError, match="their trainer is closed"):
        publisher.publish(1, replace(weights(), tensors=closing), [ELSEWHERE])
    assert memories() == before


def test_a_publication_that_cannot_be_kept_for_readers_here_leaves_nothing(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = memories()

    def full(_: object) -> None:
        raise MemoryError("no room for an offer")

    monkeypatch.setattr("penstock.weights.transports.in_process.offer", full)
    with pytest.raises(MemoryError):
        publisher.publish(1, weights(), [HERE, ELSEWHERE])
    assert memories() == before

"""Several clients at once, on every adapter: rows are never mixed, calls end, and the last word is one put's."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import ObjectColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError, MissingRowError
from tests.data_plane.opened import Opened
from tests.data_plane.support import FIELDS, SCHEMA, columns, meta_of

LONG = 60.0
IDS = [f"s{row}" for row in range(8)]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls in threads of their own that begin together; what they return, in order. Errors are raised."""
    barrier = threading.Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        barrier.wait(LONG)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(LONG) for each in [pool.submit(begin, call) for call in calls]]


def number_of(plane: DataPlaneClient, partition: str) -> float | None:
    """Which put all rows come from; None while they are cleared."""
    try:
        batch = plane.get_samples(meta_of(partition, *IDS), FIELDS)
    except MissingRowError:
        return None
    numbers = set(batch.tensor("reward").tolist())
    numbers |= {float(batch.jagged("tokens").row(row)[0]) + 4 for row in range(len(IDS))}
    numbers |= {float(text.split()[2]) + 4 for text in batch.objects("text").items}
    assert len(numbers) == 1, f"rows of several puts: {numbers}"
    return float(numbers.pop())


def test_a_field_that_another_client_puts_again_is_its_for_everybody(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    other.register_partition(partition, SCHEMA)
    plane.put_samples(["a", "b"], columns([2, 3]), partition, [{"n": 1}, {"n": 1}])
    claimed = plane.claim_meta(partition, "t", FIELDS, 2, timeout=LONG)
    other.put_samples(["b"], {"reward": torch.full((1,), 9.0)}, partition, [{"m": 2}])
    for each in (plane, other):
        batch = each.get_samples(claimed, FIELDS)
        assert batch.tensor("reward").tolist() == [2.0, 9.0]
        assert batch.objects("text").items == ("row 2 0", "row 3 0")
        assert each.check_consumption_status(partition, "t") == {"a": True, "b": True}, "the claim is as it was"
    again = other.claim_meta(partition, "u", ["reward"], 2, timeout=LONG)
    assert [dict(tags) for tags in again.tags] == [{"n": 1}, {"n": 1, "m": 2}]


def test_rows_that_others_put_and_clear_at_once_are_those_of_one_put(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    ended = threading.Event()

    def write(client: DataPlaneClient, first: int) -> None:
        for number in range(first, first + 25):
            client.put_samples(IDS, columns([4] * 8, number), partition)
            client.clear_samples(IDS, partition)

    def read(client: DataPlaneClient) -> int:
        seen = 0
        while not ended.is_set():
            seen += number_of(client, partition) is not None
        return seen

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, client) for client in (plane, other)]
        try:
            writers = [pool.submit(write, plane, 100), pool.submit(write, other, 500)]
            for writer in writers:
                writer.result(LONG)
        finally:
            ended.set()
        for reader in readers:
            reader.result(LONG)
    assert plane.count_samples(partition) == 0


def test_of_puts_at_once_one_is_the_last_and_all_of_its_rows_are_its(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    for number in range(10):
        at_once(
            lambda number=number: plane.put_samples(IDS, columns([4] * 8, number), partition),
            lambda number=number: other.put_samples(IDS[::-1], columns([4] * 8, 100 + number), partition),
        )
        assert number_of(plane, partition) in (4.0 + number, 104.0 + number)
        assert number_of(plane, partition) == number_of(other, partition)


def test_a_put_during_a_clear_leaves_all_of_its_rows_or_none(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    for number in range(20):
        at_once(
            lambda number=number: plane.put_samples(IDS, columns([4] * 8, number), partition),
            lambda: other.clear_samples(IDS, partition),
            lambda: plane.clear_samples(IDS[::-1], partition),
        )
        assert plane.count_samples(partition) in (0, 8)
        assert number_of(other, partition) in (None, 4.0 + number)


def test_a_field_added_during_a_clear_is_the_whole_of_a_new_row_or_nothing(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    for _ in range(20):
        plane.put_samples(IDS, columns([4] * 8), partition)
        at_once(
            lambda: other.put_samples(IDS, {"reward": torch.full((8,), 7.0)}, partition),
            lambda: plane.clear_samples(IDS, partition),
        )
        left = other.check_consumption_status(partition, "nobody")
        assert list(left) in ([], IDS)
        if left:
            assert plane.get_samples(meta_of(partition, *IDS), ["reward"]).tensor("reward").tolist() == [7.0] * 8
            with pytest.raises(MissingRowError, match="'s0' has no field 'tokens'"):
                plane.get_samples(meta_of(partition, *IDS), FIELDS)
            plane.clear_samples(IDS, partition)


def test_clears_at_once_remove_rows_once_and_nothing_that_comes_later(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    for _ in range(10):
        plane.put_samples(IDS, columns([4] * 8), partition)
        at_once(*(lambda client=client: client.clear_samples(IDS, partition) for client in (plane, other) * 2))
        plane.put_samples(IDS, columns([4] * 8), partition)
        assert (plane.count_samples(partition), other.count_samples(partition)) == (8, 8)
        plane.clear_samples(IDS, partition)


def test_a_link_during_a_clear_has_all_rows_or_is_an_error(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    kept = f"{partition}/kept"
    plane.register_partition(kept, SCHEMA)

    def link() -> bool:
        try:
            other.link_samples(meta_of(partition, *IDS), FIELDS, kept)
        except MissingRowError:
            return False
        return True

    for number in range(15):
        plane.put_samples(IDS, columns([4] * 8, number), partition)
        linked, _ = at_once(link, lambda: plane.clear_samples(IDS, partition))
        assert plane.count_samples(kept) == (8 if linked else 0)
        if linked:
            assert number_of(plane, kept) == 4.0 + number
        plane.clear_samples(IDS, kept)


def test_rows_that_were_put_anew_are_not_given_back_with_those_that_were_claimed(
    plane: DataPlaneClient, other: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a", "b"], columns([2, 3]), partition)
    given_up = plane.begin_claim(partition, "t", ["reward"], 2)
    meta = given_up.future.result(LONG)
    plane.clear_samples(["a"], partition)
    plane.put_samples(["a"], columns([2]), partition)
    assert other.claim_meta(partition, "t", ["reward"], 1, timeout=LONG).sample_ids == ("a",)
    given_up.give_back(meta)
    assert plane.claim_meta(partition, "t", ["reward"], 1, timeout=LONG).sample_ids == ("b",)
    assert plane.check_consumption_status(partition, "t") == {"a": True, "b": True}


def test_claims_at_once_share_out_the_rows(plane: DataPlaneClient, other: DataPlaneClient, partition: str) -> None:
    """Rows appear one by one while two clients' threads claim them; one of three tasks waits for a later field."""
    plane.register_partition(partition, SCHEMA)
    rows = [f"r{number}" for number in range(60)]

    def put() -> None:
        for number, sample in enumerate(rows):
            (plane, other)[number % 2].put_samples([sample], {"reward": torch.ones(1)}, partition)

    def score() -> list[str]:
        claimed: list[str] = []
        for _ in range(20):
            meta = other.claim_meta(partition, "score", ["reward"], 3, timeout=LONG)
            other.put_samples(meta.sample_ids, {"text": ObjectColumn(meta.sample_ids)}, partition)
            claimed += meta.sample_ids
        return claimed

    def train(client: DataPlaneClient) -> list[str]:
        claimed: list[str] = []
        for _ in range(15):
            meta = client.claim_meta(partition, "train", ["reward", "text"], 2, timeout=LONG)
            assert client.get_samples(meta, ["text"]).objects("text").items == meta.sample_ids
            claimed += meta.sample_ids
        return claimed

    _, scored, *trained = at_once(put, score, lambda: train(plane), lambda: train(other))
    assert Counter(scored) == Counter(rows)
    assert Counter(sample for each in trained for sample in each) == Counter(rows)


CALLS: dict[str, Callable[[DataPlaneClient], Any]] = {
    "register_partition": lambda plane: plane.register_partition("q", SCHEMA),
    "put_samples": lambda plane: plane.put_samples(["b"], columns([2]), "p"),
    "get_samples": lambda plane: plane.get_samples(meta_of("p", "a"), FIELDS),
    "link_samples": lambda plane: plane.link_samples(meta_of("p", "a"), FIELDS, "q"),
    "claim_meta": lambda plane: plane.claim_meta("p", "t", ["reward"], 5),
    "claim_meta, with a limit": lambda plane: plane.claim_meta("p", "t", ["reward"], 5, timeout=10 * LONG),
    "check_consumption_status": lambda plane: plane.check_consumption_status("p", "t"),
    "clear_samples": lambda plane: plane.clear_samples(["c"], "p"),
    "count_samples": lambda plane: plane.count_samples("p"),
}


def ended_well(call: Callable[[DataPlaneClient], Any], plane: DataPlaneClient, begun: threading.Event) -> int:
    """Make the call again and again, until the data plane says that it is closed; how often it was made."""
    count = 0
    while True:
        begun.set()
        try:
            call(plane)
        except DataPlaneError as error:
            if "closed" not in str(error) and "gone" not in str(error):
                raise
            return count
        count += 1


def test_a_close_during_every_call_ends_all_of_them_in_words(fresh: Opened) -> None:
    """Nobody hangs, and nobody gets anything but an answer or an error that says what happened."""
    plane = fresh.plane
    plane.register_partition("p", SCHEMA)
    plane.put_samples(["a"], columns([3]), "p")
    begun = {name: threading.Event() for name in CALLS}
    calls: dict[str, Future[int]] = {}
    with ThreadPoolExecutor(len(CALLS)) as pool:
        for name, call in CALLS.items():
            calls[name] = pool.submit(ended_well, call, plane, begun[name])
        for each in begun.values():
            assert each.wait(LONG)
        plane.close()
        wait(calls.values(), LONG)
        assert [name for name, future in calls.items() if not future.done()] == []
    for future in calls.values():
        future.result()
    plane.close()


async def test_a_close_during_every_async_call_ends_all_of_them_in_words(fresh: Opened) -> None:
    plane = fresh.plane
    await plane.register_partition_async("p", SCHEMA)
    await plane.put_samples_async(["a"], columns([3]), "p")
    calls = [
        plane.put_samples_async(["b"], columns([2]), "p"),
        plane.get_samples_async(KVBatchMeta("p", ("a",), frozenset(FIELDS), (3,)), FIELDS),
        plane.link_samples_async(meta_of("p", "a"), FIELDS, "q"),
        *(plane.claim_meta_async("p", "t", ["reward"], 5) for _ in range(20)),
        *(plane.count_samples_async("p") for _ in range(40)),
        plane.clear_samples_async(["c"], "p"),
        plane.check_consumption_status_async("p", "t"),
    ]
    begun = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    await plane.close_async()
    async with asyncio.timeout(LONG):
        outcomes = await asyncio.gather(*begun, return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    assert [error for error in errors if not isinstance(error, DataPlaneError)] == []
    assert len(errors) >= 20, "the claims"
    with pytest.raises(DataPlaneError, match=r"closed|gone"):
        await plane.count_samples_async("p")

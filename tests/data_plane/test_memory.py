"""The memory adapter: rows come back equal, all or nothing, and without copies where that is possible."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn, ObjectColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError, MissingRowError

FIELDS = ("tokens", "reward", "text")


@pytest.fixture
def plane() -> MemoryDataPlane:
    client = MemoryDataPlane()
    client.register_partition("p", FIELDS)
    return client


def columns(lengths: list[int], offset: int = 0) -> dict[str, Any]:
    return {
        "tokens": JaggedColumn.from_rows([torch.arange(n) + offset for n in lengths]),
        "reward": torch.tensor([float(n + offset) for n in lengths]),
        "text": ObjectColumn(tuple(None if n == 0 else f"row {n} {offset}" for n in lengths)),
    }


def meta_of(*samples: str) -> KVBatchMeta:
    return KVBatchMeta("p", samples, frozenset(FIELDS), (0,) * len(samples))


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_any_rows_of_any_puts_come_back_equal_and_in_order(puts: list[list[int]], rng: Any) -> None:
    plane = MemoryDataPlane()
    plane.register_partition("p", FIELDS)
    expected: dict[str, tuple[list[int], float, Any]] = {}
    for number, lengths in enumerate(puts):
        ids = [f"g{number}_g{i}" for i in range(len(lengths))]
        data = columns(lengths, number)
        plane.put_samples(ids, data, "p")
        for i, sample in enumerate(ids):
            expected[sample] = (data["tokens"].row(i).tolist(), float(data["reward"][i]), data["text"].items[i])
    order = list(expected)
    rng.shuffle(order)
    batch = plane.get_samples(meta_of(*order), FIELDS)
    for i, sample in enumerate(order):
        tokens, reward, text = expected[sample]
        assert batch.jagged("tokens").row(i).tolist() == tokens
        assert float(batch.tensor("reward")[i]) == reward
        assert batch.objects("text").items[i] == text


def test_a_group_read_back_as_written_is_not_copied(plane: MemoryDataPlane) -> None:
    data = columns([3, 4])
    plane.put_samples(["a_g0", "a_g1"], data, "p")
    batch = plane.get_samples(meta_of("a_g0", "a_g1"), FIELDS)
    assert batch.jagged("tokens").values.data_ptr() == data["tokens"].values.data_ptr()


def test_missing_rows_and_fields_are_named(plane: MemoryDataPlane) -> None:
    plane.put_samples(["a_g0"], {"reward": torch.zeros(1)}, "p")
    with pytest.raises(MissingRowError, match="'b_g0'"):
        plane.get_samples(meta_of("b_g0"), ["reward"])
    with pytest.raises(MissingRowError, match=r"'tokens'.*reward"):
        plane.get_samples(meta_of("a_g0"), ["tokens"])


@pytest.mark.parametrize(
    ("ids", "fields", "match"),
    [
        (["a", "b"], {"reward": torch.zeros(1)}, "1 rows for 2"),
        (["a"], {"price": torch.zeros(1)}, "price"),
        (["a", "a"], {"reward": torch.zeros(2)}, "twice"),
    ],
)
def test_a_wrong_put_writes_nothing(plane: MemoryDataPlane, ids: list[str], fields: Any, match: str) -> None:
    with pytest.raises(DataPlaneError, match=match):
        plane.put_samples(ids, fields, "p")
    assert plane.count_samples("p") == 0


def test_later_puts_add_fields_to_the_same_rows(plane: MemoryDataPlane) -> None:
    plane.put_samples(["a_g0"], {"reward": torch.ones(1)}, "p")
    plane.put_samples(["a_g0"], {"text": ObjectColumn(("hi",))}, "p")
    batch = plane.get_samples(meta_of("a_g0"), ["reward", "text"])
    assert batch.objects("text").items == ("hi",)


def test_clear_is_idempotent_and_partitions_are_apart(plane: MemoryDataPlane) -> None:
    plane.register_partition("q", FIELDS)
    for partition in ("p", "q"):
        plane.put_samples(["a_g0"], {"reward": torch.ones(1)}, partition)
    plane.clear_samples(["a_g0", "never"], "p")
    plane.clear_samples(["a_g0"], "p")
    assert (plane.count_samples("p"), plane.count_samples("q")) == (0, 1)


def test_a_claim_waits_for_its_fields_and_is_made_once(plane: MemoryDataPlane) -> None:
    plane.put_samples(["a_g0"], {"reward": torch.ones(1)}, "p")
    writer = threading.Timer(0.05, plane.put_samples, (["a_g0"], {"text": ObjectColumn(("x",))}, "p"))
    writer.start()
    claimed = plane.claim_meta("p", "scorer", ["reward", "text"], 1, timeout=5)
    writer.join()
    assert claimed.sample_ids == ("a_g0",)
    assert plane.check_consumption_status("p", "scorer") == {"a_g0": True}
    with pytest.raises(DataPlaneError, match="0 of 1 rows"):
        plane.claim_meta("p", "scorer", ["reward"], 1, timeout=0.01)
    assert plane.claim_meta("p", "other task", ["reward"], 1, timeout=0.01).sample_ids == ("a_g0",)


def test_unknown_partitions_and_a_closed_plane_say_so(plane: MemoryDataPlane) -> None:
    with pytest.raises(DataPlaneError, match=r"not registered.*'p'"):
        plane.count_samples("q")
    with pytest.raises(DataPlaneError, match="already registered"):
        plane.register_partition("p", ["other"])
    plane.close()
    plane.close()
    with pytest.raises(DataPlaneError, match="closed"):
        plane.count_samples("p")


def test_a_group_costs_the_same_however_long_its_rows_are(plane: MemoryDataPlane) -> None:
    def seconds(length: int) -> float:
        data = {"tokens": JaggedColumn.from_rows([torch.zeros(length, dtype=torch.int64)] * 8)}
        ids = [f"a_g{i}" for i in range(8)]
        best = float("inf")
        for _ in range(200):
            before = time.perf_counter()
            plane.put_samples(ids, data, "p")
            plane.get_samples(meta_of(*ids), ["tokens"])
            best = min(best, time.perf_counter() - before)
        return best

    assert seconds(100_000) < 3 * seconds(10) + 20e-6

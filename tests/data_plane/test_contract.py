"""What every data plane promises: rows come back equal, all or nothing, and a claim is made once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import JaggedColumn, ObjectColumn, take_rows
from penstock.data_plane.schema import spec_of
from penstock.errors import DataPlaneError, MissingRowError
from tests.data_plane.conftest import new_partition
from tests.data_plane.support import FIELDS, SCHEMA, any_columns, cells_of, columns, meta_of, plain_cells

LONG = 60.0
"""Seconds; nothing here takes them."""
often = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@often
@given(data=st.data())
def test_any_rows_of_any_puts_come_back_equal_and_in_any_order(plane: DataPlaneClient, data: st.DataObject) -> None:
    partition, rows = new_partition(), data.draw(st.integers(1, 6))
    whole = data.draw(any_columns(rows))
    plane.register_partition(partition, [spec_of(name, column) for name, column in whole.items()])
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=2)) | {0, rows})
    for start, stop in itertools.pairwise(cuts):
        part = {name: take_rows(column, range(start, stop)) for name, column in whole.items()}
        plane.put_samples([f"s{row}" for row in range(start, stop)], part, partition)
    order = data.draw(st.lists(st.integers(0, rows - 1), max_size=8))
    selected = data.draw(st.lists(st.sampled_from(sorted(whole)), unique=True))
    batch = plane.get_samples(meta_of(partition, *(f"s{row}" for row in order)), selected)
    assert batch.sample_ids == tuple(f"s{row}" for row in order)
    assert list(batch.columns) == selected
    for name in selected:
        assert cells_of(batch, name) == [plain_cells(whole[name], row) for row in order]


def test_thousands_of_rows(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    ids = [f"s{row}" for row in range(3000)]
    plane.put_samples(ids, columns([row % 5 for row in range(3000)]), partition)
    backwards = plane.get_samples(meta_of(partition, *reversed(ids)), FIELDS)
    assert backwards.jagged("tokens").lengths_R.tolist() == [row % 5 for row in reversed(range(3000))]
    assert backwards.objects("text").items[0] == "row 4 0"
    plane.clear_samples(ids, partition)
    assert plane.count_samples(partition) == 0


def test_an_environment_may_declare_columns_of_one_number_or_of_any_shape(
    plane: DataPlaneClient, partition: str
) -> None:
    made = {"one": torch.arange(3.0), "column": torch.arange(3.0).view(3, 1), "image": torch.randn(3, 2, 4)}
    plane.register_partition(partition, [spec_of(name, column) for name, column in made.items()])
    plane.put_samples(["a", "b", "c"], made, partition)
    batch = plane.get_samples(meta_of(partition, "a", "b", "c"), list(made))
    assert {name: tuple(batch.tensor(name).shape) for name in made} == {
        "one": (3,),
        "column": (3, 1),
        "image": (3, 2, 4),
    }


def test_no_rows_and_no_columns_are_fine(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a"], columns([2]), partition)
    nothing = plane.get_samples(meta_of(partition, "a"), [])
    assert (len(nothing), dict(nothing.columns)) == (1, {})
    empty = plane.get_samples(meta_of(partition), FIELDS)
    assert (len(empty.jagged("tokens")), len(empty.tensor("reward")), len(empty.objects("text"))) == (0, 0, 0)
    assert empty.jagged("tokens").values.dtype == torch.int64
    plane.put_samples([], {}, partition)
    with pytest.raises(MissingRowError, match="'b'"):
        plane.get_samples(meta_of(partition, "b"), [])


def test_missing_rows_and_fields_are_named(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a_g0"], {"reward": torch.zeros(1)}, partition)
    with pytest.raises(MissingRowError, match="'b_g0'"):
        plane.get_samples(meta_of(partition, "b_g0"), ["reward"])
    with pytest.raises(MissingRowError, match=r"'tokens'.*reward"):
        plane.get_samples(meta_of(partition, "a_g0"), ["tokens"])


@pytest.mark.parametrize(
    ("ids", "fields", "match"),
    [
        (["a", "b"], {"reward": torch.zeros(1)}, "'reward' has 1 rows for 2"),
        (["a"], {"price": torch.zeros(1)}, r"'price'.*'reward', 'text', 'tokens'"),
        (["a", "a"], {"reward": torch.zeros(2)}, "twice"),
        (["a"], {"reward": torch.zeros(1).double()}, r"'reward', row 'a': expected fixed float32, got fixed float64"),
        (["a"], {"reward": ObjectColumn((1.0,))}, r"'reward', row 'a': expected fixed float32, got object"),
        (["a"], {"reward": torch.zeros(())}, r"'reward', row 'a': expected fixed float32, got Tensor"),
        (["a"], {"tokens": torch.zeros(1).long()}, r"'tokens', row 'a': expected per-token int64, got fixed int64"),
        (["a"], {"text": torch.zeros(1)}, r"'text', row 'a': expected object, got fixed float32"),
        (["a", "b"], {"text": ObjectColumn(("fine", {1: 2}))}, r"'text', row 'b': expected text.*the key 1"),
        (["a", "b"], {"text": ObjectColumn(("fine", [(1, 2)]))}, r"'text', row 'b': expected text.*a tuple"),
        (["a", "b"], {"text": ObjectColumn((None, b"raw"))}, r"'text', row 'b': expected text.*a bytes"),
        (
            ["a", "b"],
            {"tokens": JaggedColumn(torch.arange(4), torch.tensor([0, 5, 4]))},
            r"'tokens', row 'b': expected rows one after the other from 0 to 4, got 5 to 4",
        ),
        (["a"], {"tokens": JaggedColumn(torch.arange(4), torch.tensor([0, 3]))}, r"'tokens', row 'a'.*from 0 to 4"),
    ],
)
def test_a_put_that_does_not_fit_is_refused_by_field_and_row_and_writes_nothing(
    plane: DataPlaneClient, partition: str, ids: list[str], fields: Any, match: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    with pytest.raises(DataPlaneError, match=match):
        plane.put_samples(ids, fields | {"text": ObjectColumn(("ok",) * len(ids))} | fields, partition)
    assert plane.count_samples(partition) == 0


def test_tags_must_be_one_per_row_and_plain(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    with pytest.raises(DataPlaneError, match="1 tags for 2"):
        plane.put_samples(["a", "b"], columns([1, 1]), partition, [{}])
    with pytest.raises(DataPlaneError, match=r"row 'b'.*Tensor"):
        plane.put_samples(["a", "b"], columns([1, 1]), partition, [{}, {"x": torch.zeros(1)}])
    assert plane.count_samples(partition) == 0


def test_a_schema_is_declared_once_and_for_all(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.register_partition(partition, tuple(reversed(SCHEMA)))
    with pytest.raises(DataPlaneError, match=rf"'{partition}' is already registered.*'text'"):
        plane.register_partition(partition, SCHEMA[:2])
    with pytest.raises(DataPlaneError, match=r"not registered.*'p"):
        plane.count_samples("nobody's")


def test_later_puts_add_and_replace_fields_of_the_same_rows(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a", "b"], {"reward": torch.ones(2)}, partition, [{"n": 1}, {}])
    plane.put_samples(["b", "a"], {"text": ObjectColumn(("of b", "of a"))}, partition, [{"n": 2}, {"m": 3}])
    plane.put_samples(["b"], {"reward": torch.full((1,), 7.0)}, partition)
    batch = plane.get_samples(meta_of(partition, "a", "b"), ["reward", "text"])
    assert batch.tensor("reward").tolist() == [1.0, 7.0]
    assert batch.objects("text").items == ("of a", "of b")
    claimed = plane.claim_meta(partition, "t", ["reward"], 2, timeout=LONG)
    assert [dict(tags) for tags in claimed.tags] == [{"n": 1, "m": 3}, {"n": 2}]


def test_clear_is_idempotent_and_partitions_are_apart(plane: DataPlaneClient) -> None:
    one, other = new_partition(), new_partition()
    for each in (one, other):
        plane.register_partition(each, SCHEMA)
        plane.put_samples(["a"], {"reward": torch.ones(1)}, each)
    plane.clear_samples(["a", "never"], one)
    plane.clear_samples(["a"], one)
    assert (plane.count_samples(one), plane.count_samples(other)) == (0, 1)


def test_what_was_read_outlives_a_clear_and_a_later_put_begins_anew(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a", "b"], columns([3, 4]), partition)
    plane.claim_meta(partition, "t", ["reward"], 2, timeout=LONG)
    held = plane.get_samples(meta_of(partition, "a", "b"), FIELDS)
    before = [cells_of(held, name) for name in FIELDS]
    plane.clear_samples(["a", "b"], partition)
    for number in range(20):
        plane.put_samples([f"c{number}"], columns([50], 1000), partition)
    assert [cells_of(held, name) for name in FIELDS] == before
    with pytest.raises(MissingRowError, match="'a'"):
        plane.get_samples(meta_of(partition, "a"), ["reward"])
    plane.put_samples(["a"], {"reward": torch.zeros(1)}, partition)
    assert plane.check_consumption_status(partition, "t")["a"] is False
    with pytest.raises(MissingRowError, match="'tokens'"):
        plane.get_samples(meta_of(partition, "a"), ["tokens"])


def test_a_get_during_clears_gives_whole_rows_or_an_error(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    ids, ended = [f"s{row}" for row in range(8)], threading.Event()
    plane.put_samples(ids, columns([4] * 8, 0), partition)

    def churn() -> None:
        for number in range(1, 60):
            plane.clear_samples(ids, partition)
            plane.put_samples(ids, columns([4] * 8, number), partition)
        ended.set()

    thread = threading.Thread(target=churn)
    thread.start()
    seen = set()
    while not ended.is_set():
        try:
            batch = plane.get_samples(meta_of(partition, *ids), FIELDS)
        except MissingRowError:
            continue
        numbers = set(batch.tensor("reward").tolist()) | {float(batch.jagged("tokens").row(i)[0]) + 4 for i in range(8)}
        assert len(numbers) == 1, "rows of one put only"
        seen |= numbers
    thread.join()
    assert plane.get_samples(meta_of(partition, *ids), ["reward"]).tensor("reward").tolist() == [63.0] * 8


def test_a_claim_waits_for_its_fields_and_is_made_once(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a"], columns([3]), partition)
    plane.put_samples(["b"], {"reward": torch.ones(1)}, partition)
    pending = plane.begin_claim(partition, "scorer", ["reward", "text"], 2)
    assert not pending.future.done()
    plane.put_samples(["b"], {"text": ObjectColumn(("x",))}, partition)
    claimed = pending.future.result(LONG)
    assert (claimed.sample_ids, claimed.sequence_lengths, claimed.task_name) == (("a", "b"), (3, 0), "scorer")
    assert claimed.fields == {"reward", "text"}
    assert plane.check_consumption_status(partition, "scorer") == {"a": True, "b": True}
    with pytest.raises(DataPlaneError, match="0 of 1 rows"):
        plane.claim_meta(partition, "scorer", ["reward"], 1, timeout=0.01)
    assert plane.claim_meta(partition, "other task", ["reward"], 1, timeout=LONG).sample_ids == ("a",)


def test_a_claim_for_a_field_that_no_row_can_have_is_refused(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    with pytest.raises(DataPlaneError, match=r"'price'.*'reward'"):
        plane.claim_meta(partition, "t", ["price"], 1, timeout=LONG)


def test_a_claim_that_timed_out_claims_nothing(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a"], columns([1]), partition)
    with pytest.raises(DataPlaneError, match=r"1 of 2 rows with \['reward'\] for t after 0.01 s"):
        plane.claim_meta(partition, "t", ["reward"], 2, timeout=0.01)
    plane.put_samples(["b"], columns([1]), partition)
    assert plane.claim_meta(partition, "t", ["reward"], 2, timeout=LONG).sample_ids == ("a", "b")


async def test_a_cancelled_claim_claims_nothing(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a"], columns([1]), partition)
    claims = [asyncio.create_task(plane.claim_meta_async(partition, "t", ["reward"], 2)) for _ in range(50)]
    await asyncio.sleep(0)
    for claim in claims:
        claim.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*claims, return_exceptions=True)
    )
    plane.put_samples(["b"], columns([1]), partition)
    assert plane.check_consumption_status(partition, "t") == {"a": False, "b": False}


async def test_a_claim_cancelled_as_its_rows_arrive_gives_them_back(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    claim = asyncio.create_task(plane.claim_meta_async(partition, "t", ["reward"], 1))
    await asyncio.sleep(0)
    plane.put_samples(["a"], columns([1]), partition)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    claimed = await plane.claim_meta_async(partition, "t", ["reward"], 1, LONG)
    assert claimed.sample_ids == ("a",)


async def test_many_claims_wait_without_holding_up_other_calls(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, SCHEMA)
    claims = [asyncio.create_task(plane.claim_meta_async(partition, "t", ["reward"], 1)) for _ in range(100)]
    await asyncio.sleep(0)
    ids = [f"s{row}" for row in range(100)]
    await asyncio.wait_for(plane.put_samples_async(ids, columns([1] * 100), partition), LONG)
    claimed = await asyncio.wait_for(asyncio.gather(*claims), LONG)
    assert sorted(sample for meta in claimed for sample in meta.sample_ids) == sorted(ids)


async def test_every_call_has_an_async_form(plane: DataPlaneClient, partition: str) -> None:
    await plane.register_partition_async(partition, SCHEMA)
    await plane.put_samples_async(["a"], columns([2]), partition, [{"n": 1}])
    assert await plane.count_samples_async(partition) == 1
    assert await plane.check_consumption_status_async(partition, "t") == {"a": False}
    batch = await plane.get_samples_async(meta_of(partition, "a"), FIELDS)
    assert batch.jagged("tokens").row(0).tolist() == [0, 1]
    await plane.clear_samples_async(["a"], partition)
    assert await plane.count_samples_async(partition) == 0

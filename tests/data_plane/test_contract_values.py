"""What rows may hold, on every adapter: every dtype to the bit, any shape, any text, any name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn, take_rows
from penstock.data_plane.field_spec import FLOATING, fixed, objects, per_token
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.schema import spec_of
from penstock.errors import DataPlaneError
from tests.data_plane.conftest import new_partition
from tests.data_plane.support import DTYPES, SCHEMA, TAILS, any_bits, cells_of, columns, meta_of, plain_cells

often = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
names = st.text(st.characters(exclude_categories=()), max_size=6)
"""With NUL, control characters and halves of surrogate pairs."""


def assert_comes_back(
    plane: DataPlaneClient, reader: DataPlaneClient, made: dict[str, Column], ids: list[str], order: list[int]
) -> None:
    """Put as two puts, read in that order, with repeats."""
    partition, half = new_partition(), len(ids) // 2
    plane.register_partition(partition, [spec_of(name, column) for name, column in made.items()])
    for rows in (range(half), range(half, len(ids))):
        part = {name: take_rows(column, rows) for name, column in made.items()}
        plane.put_samples([ids[row] for row in rows], part, partition)
    batch = reader.get_samples(meta_of(partition, *(ids[row] for row in order)), list(made))
    assert batch.sample_ids == tuple(ids[row] for row in order)
    for name, column in made.items():
        assert cells_of(batch, name) == [plain_cells(column, row) for row in order]


@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_every_dtype_comes_back_to_the_bit(plane: DataPlaneClient, other: DataPlaneClient, tail: Any) -> None:
    rng = torch.Generator().manual_seed(1)
    made: dict[str, Column] = {}
    for dtype in DTYPES:
        made[f"fixed {dtype}"] = any_bits((4, *tail), dtype, rng)
        made[f"per token {dtype}"] = JaggedColumn.from_rows([any_bits((n, *tail), dtype, rng) for n in (2, 0, 3, 0)])
    assert_comes_back(plane, other, made, ["a", "b", "c", "d"], [3, 1, 1, 0, 2])


@often
@given(
    ids=st.lists(names, min_size=1, max_size=5, unique=True),
    fields=st.lists(names, min_size=1, max_size=3, unique=True),
    data=st.data(),
)
def test_rows_and_fields_may_have_any_name(
    plane: DataPlaneClient, other: DataPlaneClient, ids: list[str], fields: list[str], data: st.DataObject
) -> None:
    made: dict[str, Column] = {name: ObjectColumn(tuple(f"{name} of {sample}" for sample in ids)) for name in fields}
    assert_comes_back(plane, other, made, ids, data.draw(st.permutations(range(len(ids)))))


@often
@given(name=st.text(st.characters(exclude_categories=()), min_size=1, max_size=6))
def test_a_partition_a_task_and_tags_may_have_any_name(plane: DataPlaneClient, name: str) -> None:
    partition = f"{new_partition()} {name}"
    plane.register_partition(partition, SCHEMA)
    plane.put_samples(["a"], columns([2]), partition, [{name: {"deep": [name, None, 1.5]}}])
    claimed = plane.claim_meta(partition, name, ["tokens"], 1, timeout=60)
    assert (claimed.partition_id, claimed.task_name) == (partition, name)
    assert [dict(tags) for tags in claimed.tags] == [{name: {"deep": [name, None, 1.5]}}]
    assert plane.check_consumption_status(partition, name) == {"a": True}


OBJECTS = {
    "nothing": None,
    "no text": "",
    "halves of surrogate pairs": "\ud800 and \udfff",
    "beyond the basic plane": "🜚 é \u2028 \x00",
    "what looks like our own forms": 'j{"a": 1}',
    "deep": [[[[[{"a": [{}, [], None]}]]]]],
    "numbers": [0, -1, 2**63, -(2**200), 0.1, -0.0, float("inf"), 1e-320],
    "truth": [True, False, 1, 0],
    "keys": {"": None, "\ud800": 1, "a": {"a": {"a": "a"}}},
}


def test_objects_of_every_kind_in_one_column(plane: DataPlaneClient, other: DataPlaneClient) -> None:
    items = tuple(OBJECTS.values())
    made: dict[str, Column] = {"object": ObjectColumn(items), "all of nothing": ObjectColumn((None,) * len(items))}
    ids = list(OBJECTS)
    assert_comes_back(plane, other, made, ids, [*reversed(range(len(ids))), 0, 0])
    assert repr(items) == repr(tuple(OBJECTS.values())), "what was put is as it was"


def test_a_nan_among_objects_is_one_afterwards(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, [objects("text")])
    plane.put_samples(["a"], {"text": ObjectColumn((float("nan"),))}, partition)
    (found,) = plane.get_samples(meta_of(partition, "a"), ["text"]).objects("text").items
    assert found != found


def test_a_floating_field_keeps_the_dtype_of_each_put(plane: DataPlaneClient, partition: str) -> None:
    plane.register_partition(partition, [per_token("x", FLOATING), fixed("y", FLOATING)])
    rows = {"a": torch.bfloat16, "b": torch.float32}
    for sample, dtype in rows.items():
        made = {"x": JaggedColumn.from_rows([torch.ones(2, dtype=dtype)]), "y": torch.ones(1, dtype=dtype)}
        plane.put_samples([sample], made, partition)
    for sample, dtype in rows.items():
        batch = plane.get_samples(meta_of(partition, sample), ["x", "y"])
        assert (batch.jagged("x").values.dtype, batch.tensor("y").dtype) == (dtype, dtype)
    with pytest.raises(DataPlaneError, match=r"field 'x'.*bfloat16 \[\] and float32 \[\]"):
        plane.get_samples(meta_of(partition, "a", "b"), ["x"])
    with pytest.raises(DataPlaneError, match="'x', row 'c': expected per-token floating, got per-token int64"):
        plane.put_samples(["c"], {"x": JaggedColumn.from_rows([torch.arange(2)])}, partition)


def test_rows_of_one_field_with_different_shapes_are_an_error_that_names_it(
    plane: DataPlaneClient, partition: str
) -> None:
    plane.register_partition(partition, [fixed("image", "float32")])
    for sample, width in (("a", 2), ("b", 3)):
        plane.put_samples([sample], {"image": torch.zeros(1, width)}, partition)
    assert plane.get_samples(meta_of(partition, "b"), ["image"]).tensor("image").shape == (1, 3)
    with pytest.raises(DataPlaneError, match=r"field 'image'.*float32 \[2\] and float32 \[3\]"):
        plane.get_samples(meta_of(partition, "a", "b"), ["image"])


def test_rows_are_data_without_the_graph_that_computed_them(plane: DataPlaneClient, partition: str) -> None:
    weights = torch.ones(3, requires_grad=True)
    plane.register_partition(partition, [per_token("x", "float32"), fixed("y", "float32")])
    made = {"x": JaggedColumn(weights * 2, torch.tensor([0, 1, 3])), "y": weights[:2] * 3}
    plane.put_samples(["a", "b"], made, partition)
    batch = plane.get_samples(meta_of(partition, "a", "b"), ["x", "y"])
    assert not batch.jagged("x").values.requires_grad
    assert not batch.tensor("y").requires_grad
    assert batch.jagged("x").values.tolist() == [2.0, 2.0, 2.0]


def test_lazily_conjugated_and_overlapping_tensors_come_back_as_they_look(
    plane: DataPlaneClient, partition: str
) -> None:
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    made: dict[str, Column] = {
        "conjugated": turned,
        "imaginary": turned.imag,
        "expanded": torch.tensor([7]).expand(2, 3),
        "transposed": torch.arange(6).view(3, 2).T,
    }
    plane.register_partition(partition, [spec_of(name, column) for name, column in made.items()])
    plane.put_samples(["a", "b"], made, partition)
    batch = plane.get_samples(meta_of(partition, "b", "a"), list(made))
    for name, column in made.items():
        assert isinstance(column, torch.Tensor)
        assert batch.tensor(name).tolist() == column.flip(0).tolist()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda plane, p: plane.put_samples([3], {"reward": torch.zeros(1)}, p), "sample ids are text; got 3"),
        (lambda plane, p: plane.put_samples(["a", None], {"reward": torch.zeros(2)}, p), "text; got None"),
        (lambda plane, p: plane.register_partition(7, SCHEMA), "a partition's name is text; got 7"),
        (lambda plane, p: plane.register_partition(f"{p} b", ["reward"]), "fields are FieldSpecs; got 'reward'"),
        (lambda plane, p: plane.claim_meta(p, "t", ["reward"], 0), "for one row or more; got 0"),
        (lambda plane, p: plane.claim_meta(p, "t", ["reward"], -1), "for one row or more; got -1"),
        (lambda plane, p: plane.claim_meta(p, "t", ["reward"], float("nan")), "for one row or more; got nan"),
        (lambda plane, p: plane.claim_meta(p, 5, ["reward"], 1), "a task's name is text; got 5"),
        (lambda plane, p: plane.get_samples(meta_of("nowhere", "a"), []), "'nowhere' is not registered"),
        (lambda plane, p: plane.clear_samples(["a"], "nowhere"), "'nowhere' is not registered"),
        (lambda plane, p: plane.check_consumption_status("nowhere", "t"), "'nowhere' is not registered"),
        (lambda plane, p: plane.put_samples([], {}, "nowhere"), "'nowhere' is not registered"),
        (lambda plane, p: plane.claim_meta("nowhere", "t", [], 1), "'nowhere' is not registered"),
        (lambda plane, p: plane.get_samples(KVBatchMeta(p, (), frozenset(), ()), ["price"]), "'price'.*'reward'"),
    ],
)
def test_calls_that_make_no_sense_are_refused_in_words(
    plane: DataPlaneClient, partition: str, call: Any, match: str
) -> None:
    plane.register_partition(partition, SCHEMA)
    with pytest.raises(DataPlaneError, match=match):
        call(plane, partition)
    assert plane.count_samples(partition) == 0

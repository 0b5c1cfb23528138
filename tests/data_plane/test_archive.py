"""Rows on disk come back as they were; what is damaged or cannot be written is said in words."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penstock.data_plane.archive import load_rows, save_rows
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.field_spec import DTYPES
from penstock.errors import DataPlaneError
from tests.data_plane.support import any_bits, cells_of

dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool]
)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=9)


@st.composite
def columns(draw: st.DrawFn, rows: int) -> Column:
    kind = draw(st.sampled_from(["jagged", "tensor", "object"]))
    if kind == "object":
        return ObjectColumn(tuple(draw(st.lists(json_like, min_size=rows, max_size=rows))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tail, dtype = draw(st.sampled_from([(), (3,), (2, 2), (0,)])), draw(dtypes)
    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)) if kind == "jagged" else [1] * rows
    parts = [torch.randint(0, 2, (n, *tail), generator=generator).to(dtype) for n in lengths]
    return JaggedColumn.from_rows(parts) if kind == "jagged" else torch.cat(parts)


@st.composite
def batches(draw: st.DrawFn) -> SampleBatch:
    sample_ids = tuple(draw(st.lists(names, min_size=1, max_size=5, unique=True)))
    return SampleBatch(sample_ids, draw(st.dictionaries(names, columns(len(sample_ids)), max_size=4)))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_numbers_of_every_dtype_come_back_to_the_bit(tmp_path: Path, dtype: str) -> None:
    numbers = any_bits((3, 2), getattr(torch, dtype), torch.Generator().manual_seed(0))
    batch = SampleBatch(
        ("a", "b"), {"fixed": numbers[:2], "tokens": JaggedColumn.from_rows([numbers[:1], numbers[1:]])}
    )
    save_rows(tmp_path, batch)
    found = load_rows(tmp_path)
    assert {name: cells_of(found, name) for name in batch.columns} == {
        name: cells_of(batch, name) for name in batch.columns
    }
    assert found.tensor("fixed").dtype == numbers.dtype


def same(left: Column, right: Column) -> bool:
    if isinstance(left, JaggedColumn):
        assert isinstance(right, JaggedColumn)
        return same(left.values, right.values) and torch.equal(left.offsets_R1, right.offsets_R1)
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    return left == right


@settings(max_examples=60, deadline=None)
@given(batches())
def test_rows_of_every_kind_come_back_as_they_were(batch: SampleBatch) -> None:
    with TemporaryDirectory() as name:
        save_rows(Path(name), batch)
        back = load_rows(Path(name))
    assert back.sample_ids == batch.sample_ids
    assert back.columns.keys() == batch.columns.keys()
    assert all(same(column, back.columns[field]) for field, column in batch.columns.items())


ROWS = SampleBatch(
    ("a_g0", "a_g1"),
    {
        "ids": JaggedColumn.from_rows([torch.arange(3), torch.arange(2)]),
        "reward": torch.tensor([0.5, 1.0]),
        "text": ObjectColumn(("one", None)),
    },
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_rows(tmp_path, ROWS)
    return tmp_path


def test_a_part_of_a_larger_tensor_is_saved_without_the_rest(tmp_path: Path) -> None:
    whole = torch.zeros(100_000)
    save_rows(tmp_path, SampleBatch(("a_g0",), {"reward": whole[:1], "other": whole[:1]}))
    assert (tmp_path / "rows.safetensors").stat().st_size < 1000


def _without(path: Path, key: str) -> None:
    save_file({name: tensor for name, tensor in load_file(path).items() if name != key}, path)


def _with(path: Path, key: str, tensor: torch.Tensor) -> None:
    save_file(load_file(path) | {key: tensor}, path)


def _rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


TENSORS, REST = "rows.safetensors", "rows.json"
DAMAGES = {
    "no tensors": lambda f: (f / TENSORS).unlink(),
    "no json": lambda f: (f / REST).unlink(),
    "tensors cut off": lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-3]),
    "tensors empty": lambda f: (f / TENSORS).write_bytes(b""),
    "json cut off": lambda f: (f / REST).write_text((f / REST).read_text()[:-5]),
    "json not utf-8": lambda f: (f / REST).write_bytes(b"\xff\xfe{"),
    "json a list": lambda f: (f / REST).write_text("[1]"),
    "objects a number": lambda f: _rewrite(f / REST, objects=3),
    "a sample too many": lambda f: _rewrite(f / REST, sample_ids=["a_g0", "a_g1", "a_g2"]),
    "a text too few": lambda f: _rewrite(f / REST, objects={"text": ["one"]}),
    "no offsets": lambda f: _without(f / TENSORS, "ids/offsets"),
    "offsets beyond the end": lambda f: _with(f / TENSORS, "ids/offsets", torch.tensor([0, 3, 6])),
    "offsets fall": lambda f: _with(f / TENSORS, "ids/offsets", torch.tensor([0, 9, 5])),
    "offsets are no numbers of rows": lambda f: _with(f / TENSORS, "ids/offsets", torch.tensor([0.0, 3.0, 5.0])),
    "a single number": lambda f: _with(f / TENSORS, "reward/tensor", torch.tensor(1.0)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_refused_with_the_folder(saved: Path, damage: str) -> None:
    DAMAGES[damage](saved)
    with pytest.raises(DataPlaneError) as caught:
        load_rows(saved)
    assert str(saved) in str(caught.value)


def test_an_object_without_a_form_in_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataPlaneError, match="text must be text or JSON-like"):
        save_rows(tmp_path, SampleBatch(("a_g0",), {"text": ObjectColumn((object(),))}))


@contextmanager
def small_files_only() -> Iterator[None]:
    """Inside, files end at 64 bytes, as they do on a disk that is full; pytest's own output too, hence so briefly."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large"), small_files_only():
        save_rows(tmp_path, ROWS)

"""The schema of a partition, and the check that every put passes before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.field_spec import FLOATING, FieldKind, FieldSpec
from penstock.data_plane.meta import Tags
from penstock.data_plane.plain import problem_with
from penstock.errors import DataPlaneError


class Schema:
    """The fields that the rows of a partition may have; it never changes.

    Example: with `Schema([FieldSpec("reward", FieldKind.FIXED, "float32")])`, a put of `reward` as int64 is refused:
    "field 'reward', row 'a_g0': expected fixed float32, got fixed int64".
    """

    def __init__(self, fields: Iterable[FieldSpec]) -> None:
        self.specs: dict[str, FieldSpec] = {}
        for spec in fields:
            if not isinstance(spec, FieldSpec):
                raise DataPlaneError(f"a partition's fields are FieldSpecs; got {spec!r}")
            if self.specs.setdefault(spec.name, spec) != spec:
                raise DataPlaneError(f"field {spec.name!r} is declared as {self.specs[spec.name]} and as {spec}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.specs == other.specs

    __hash__ = None  # type: ignore[assignment]

    def require_same(self, other: Schema, partition_id: str) -> None:
        """Raise `DataPlaneError` with what differs."""
        if self == other:
            return
        names = sorted(self.specs.keys() | other.specs.keys())
        pairs = [(name, self.specs.get(name), other.specs.get(name)) for name in names]
        differing = [
            f"{name!r} is {mine or 'not in it'}, not {theirs or 'absent'}"
            for name, mine, theirs in pairs
            if mine != theirs
        ]
        raise DataPlaneError(
            f"partition {partition_id!r} is already registered with other fields: {'; '.join(differing)}"
        )

    def require_known(self, names: Iterable[str], partition_id: str) -> None:
        """Raise `DataPlaneError` for fields that no row can have."""
        unknown = [name for name in names if name not in self.specs]
        if unknown:
            raise DataPlaneError(
                f"fields {sorted(unknown, key=str)} are not part of partition {partition_id!r}, "
                f"which has {sorted(self.specs)}"
            )

    def check_claim(self, task_name: str, fields: Sequence[str], count: int, partition_id: str) -> None:
        """Raise `DataPlaneError` for a claim that could never be granted, or that says nothing."""
        self.require_known(fields, partition_id)
        if type(task_name) is not str:
            raise DataPlaneError(f"a task's name is text; got {task_name!r}")
        if type(count) is not int or count < 1:
            raise DataPlaneError(f"a claim is for one row or more; got {count!r}")

    def check_put(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        tags: Sequence[Tags] | None,
        partition_id: str,
    ) -> None:
        """Raise `DataPlaneError` naming field, row and what was expected, unless all of the put fits."""
        self.require_known(fields, partition_id)
        check_sample_ids(sample_ids)
        if len(set(sample_ids)) != len(sample_ids):
            raise DataPlaneError("a sample id occurs twice in one put")
        if tags is not None:
            check_tags(sample_ids, tags)
        checked_offsets: set[tuple[int, int]] = set()
        for name, column in fields.items():
            self._check_kind(self.specs[name], column, sample_ids)
            if len(column) != len(sample_ids):
                raise DataPlaneError(f"field {name!r} has {len(column)} rows for {len(sample_ids)} sample ids")
            if isinstance(column, ObjectColumn):
                _check_objects(name, column, sample_ids)
            elif isinstance(column, JaggedColumn):
                # Columns of one group share their offsets.
                key = (id(column.offsets_R1), column.values.shape[0])
                if key not in checked_offsets:
                    _check_offsets(name, column, sample_ids)
                    checked_offsets.add(key)

    @staticmethod
    def _check_kind(spec: FieldSpec, column: Column, sample_ids: Sequence[str]) -> None:
        found, dtype = _kind_and_dtype(column)
        if found is spec.kind and (spec.dtype == dtype or (spec.dtype == FLOATING and _is_floating(column))):
            return
        first = f", row {sample_ids[0]!r}" if sample_ids else ""
        got = type(column).__name__ if found is None else f"{found.value.replace('_', '-')} {dtype or ''}".rstrip()
        raise DataPlaneError(f"field {spec.name!r}{first}: expected {spec}, got {got}")

    def empty_column(self, name: str) -> Column:
        """The named field of no rows."""
        spec = self.specs[name]
        if spec.kind is FieldKind.OBJECT:
            return ObjectColumn(())
        dtype = torch.float32 if spec.dtype == FLOATING else getattr(torch, str(spec.dtype))
        values = torch.empty(0, dtype=dtype)
        return values if spec.kind is FieldKind.FIXED else JaggedColumn(values, torch.zeros(1, dtype=torch.int64))


def spec_of(name: str, column: Column) -> FieldSpec:
    """The spec that a column fits exactly."""
    kind, dtype = _kind_and_dtype(column)
    if kind is None:
        raise DataPlaneError(f"field {name!r}: {type(column).__name__} is no column")
    return FieldSpec(name, kind, dtype)


def _kind_and_dtype(column: Column) -> tuple[FieldKind | None, str | None]:
    if isinstance(column, JaggedColumn):
        return FieldKind.PER_TOKEN, _name(column.values.dtype)
    if isinstance(column, ObjectColumn):
        return FieldKind.OBJECT, None
    if isinstance(column, Tensor) and column.dim() > 0:
        return FieldKind.FIXED, _name(column.dtype)
    return None, None


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.int64, torch.int32, torch.float32, torch.bool)}


def _is_floating(column: Column) -> bool:
    tensor = column.values if isinstance(column, JaggedColumn) else column
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def _check_offsets(name: str, column: JaggedColumn, sample_ids: Sequence[str]) -> None:
    offsets_R1 = column.offsets_R1
    if offsets_R1.dtype != torch.int64 or offsets_R1.dim() != 1 or column.values.dim() == 0:
        raise DataPlaneError(
            f"field {name!r}: a per-token column has offsets `[rows + 1]` of int64 and values `[total, ...]`"
        )
    offsets, total = offsets_R1.tolist(), column.values.shape[0]
    bounds = [0, *offsets[1:-1], total]
    if offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] == total:
        return
    wrong = next((row for row in range(len(offsets) - 1) if offsets[row + 1] < offsets[row]), None)
    wrong = wrong if wrong is not None else (0 if offsets[0] else len(offsets) - 2)
    found = f"{offsets[wrong]} to {offsets[wrong + 1]}" if len(offsets) > 1 else f"{offsets}"
    where = f", row {sample_ids[wrong]!r}" if sample_ids else ""
    raise DataPlaneError(
        f"field {name!r}{where}: expected rows one after the other from 0 to {bounds[-1]}, got {found}"
    )


def _check_objects(name: str, column: ObjectColumn, sample_ids: Sequence[str]) -> None:
    for row, item in enumerate(column.items):
        if type(item) is not str and (problem := problem_with(item)) is not None:
            raise DataPlaneError(
                f"field {name!r}, row {sample_ids[row]!r}: expected text, None, or lists and dicts of JSON's types, "
                f"got {problem}"
            )


def check_sample_ids(sample_ids: Iterable[str]) -> None:
    """Raise `DataPlaneError` unless all of them are text."""
    if not set(map(type, sample_ids)) <= {str}:
        stranger = next(sample for sample in sample_ids if type(sample) is not str)
        raise DataPlaneError(f"sample ids are text; got {stranger!r}")


def check_tags(sample_ids: Sequence[str], tags: Sequence[Tags]) -> None:
    """Raise `DataPlaneError`, naming the row, unless there is one mapping of plain values for each."""
    if len(tags) != len(sample_ids):
        raise DataPlaneError(f"{len(tags)} tags for {len(sample_ids)} sample ids")
    for sample, each in zip(sample_ids, tags, strict=True):
        problem = problem_with(dict(each))
        if problem is not None:
            raise DataPlaneError(f"tags of row {sample!r}: expected values of JSON's types, got {problem}")

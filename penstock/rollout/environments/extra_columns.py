"""`ExtraColumn`: a column that an environment adds to its rows, next to those that Penstock writes itself."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from numbers import Real
from typing import Any, Literal, get_args

from penstock.data_plane import fields
from penstock.data_plane.field_spec import DTYPES, FieldKind, FieldSpec
from penstock.errors import ConfigError
from penstock.rollout.environments.rewards.scores import Aggregation

Kind = Literal["per_token", "fixed", "object"]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_RESERVED = frozenset(fields.SPECS) | {fields.VALID_TOKENS}
_WHOLE = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    "uint8": (0, 255),
    "bool": (0, 1),
}
"""The least and the largest of the dtypes of whole numbers."""
_LARGEST = {
    **dict.fromkeys(("float64", "complex128"), sys.float_info.max),
    **dict.fromkeys(("float32", "complex64"), (2 - 2**-23) * 2.0**127),
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float16": 65504.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fn": 448.0,
}
"""The largest finite number of the others."""
_WITHOUT_INFINITY = "float8_e4m3fn"


@dataclass(frozen=True)
class ExtraColumn:
    """One column of an environment's own: its name, what it holds, and whether it is a metric.

    Example: `ExtraColumn("image_features", "fixed", "float32", shape=(4, 8))` is a tensor of 4 x 8 numbers for every
    sample, `ExtraColumn("confidence", "per_token", "float32")` a number for every token of a row, prompt included,
    `ExtraColumn("hints", "fixed", "int64", metric="sum")` a whole number whose sum over a step is a metric, and
    `ExtraColumn("notes", "object")` text, None or what JSON can express.
    """

    name: str
    """Letters, digits and `_ . -`; not the name of a column that Penstock writes itself."""
    kind: Kind
    dtype: str | None = None
    """A dtype's name, such as `float32` or `int64`; None for objects, and only for these."""
    shape: tuple[int, ...] = ()
    """Of a sample's value, or of a token's; empty for one number."""
    metric: Aggregation | None = None
    """How the samples' numbers become the metric `rollout/<environment>/<name>`; only for one number per sample."""
    optional: bool = False
    """Whether samples may come without it: their rows then hold `missing` everywhere, and None in a column of objects.
    Such samples do not count in the metric."""
    missing: float = 0.0
    """What rows without the value hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        problem = self._problem()
        if problem is not None:
            raise ConfigError([f"extra_columns: {self.name!r} {problem}"])
        missing = float(self.missing or 0)
        object.__setattr__(self, "missing", math.nan if math.isnan(missing) else missing)

    def __eq__(self, other: object) -> bool:
        """As of any dataclass, but a `missing` that is NaN is the same as another that is."""
        # All NaNs are one object here, and tuples compare their items by identity first.
        return astuple(self) == astuple(other) if isinstance(other, ExtraColumn) else NotImplemented

    @property
    def spec(self) -> FieldSpec:
        """What the data plane is told about it."""
        return FieldSpec(self.name, FieldKind(self.kind), self.dtype)

    def __str__(self) -> str:
        shape = f" of shape {list(self.shape)}" if self.shape else ""
        return f"{self.spec}{shape}"

    def _problem(self) -> str | None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            return "is not a name: use 1 to 100 letters, digits and _ . -, the first a letter or _"
        if self.name in _RESERVED:
            return "is a column that Penstock writes itself; choose another name"
        if self.kind not in get_args(Kind):
            return f"has the kind {self.kind!r}; use per_token, fixed or object"
        if self.kind == "object":
            return self._problem_of_objects()
        if self.dtype not in DTYPES:
            return f"has the dtype {self.dtype!r}; use one of {', '.join(sorted(DTYPES))}"
        if not all(isinstance(size, int) and size >= 0 for size in self.shape):
            return f"has the shape {list(self.shape)}; use whole numbers"
        if self.metric is not None:
            return self._problem_of_metric()
        return self._problem_of_missing()

    def _problem_of_objects(self) -> str | None:
        if self.dtype is not None or self.shape:
            return "holds objects, which have no dtype and no shape; remove them"
        if self.metric is not None:
            return "holds objects, which cannot be a metric; remove metric"
        return "holds objects: rows without one hold None; remove missing" if self.missing else None

    def _problem_of_metric(self) -> str | None:
        if self.metric not in get_args(Aggregation):
            return f"has the metric {self.metric!r}; use mean, sum or max"
        if self.kind != "fixed" or self.shape or str(self.dtype).startswith("complex"):
            return "cannot be a metric: a metric needs kind fixed, no shape, and a real dtype"
        return self._problem_of_missing()

    def _problem_of_missing(self) -> str | None:
        given: object = self.missing
        if not isinstance(given, Real):
            return f"has {given!r} for rows without it, which is not a number"
        missing = self.missing
        if missing and not self.optional:
            return "has a value for rows without it, but every row must have it; set optional, or remove missing"
        if self.dtype in _WHOLE:
            return self._problem_of_whole_missing()
        is_too_large = _LARGEST[str(self.dtype)] < abs(missing) < math.inf
        if is_too_large or (abs(missing) == math.inf and self.dtype == _WITHOUT_INFINITY):
            return f"has {missing} for rows without it, which {self.dtype} cannot hold"
        return None

    def _problem_of_whole_missing(self) -> str | None:
        missing = self.missing
        if missing % 1:  # NaN for what is not finite
            return f"holds whole numbers, so {missing} cannot stand for a missing one"
        low, high = _WHOLE[str(self.dtype)]
        if not low <= missing <= high:
            return f"has {missing} for rows without it, which {self.dtype} cannot hold: use {low} to {high}"
        if float(missing) != missing:
            return f"has {missing} for rows without it, which a float cannot hold exactly; use a smaller number"
        return None


def declared_columns(environment: object) -> tuple[ExtraColumn, ...]:
    """What an environment declares as its `extra_columns`; `ConfigError` if that is not a list of different columns."""
    given: Any = getattr(environment, "extra_columns", ())
    if not isinstance(given, Sequence) or not all(isinstance(each, ExtraColumn) for each in given):
        raise ConfigError([f"extra_columns: give a tuple of ExtraColumn objects, not {given!r}"])
    names = [column.name for column in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError([f"extra_columns: {', '.join(map(repr, twice))} is declared twice"])
    return tuple(given)


def aggregations(declared: Sequence[ExtraColumn]) -> dict[str, Aggregation]:
    """How each metric among the columns is made, by name, if it is not a mean."""
    return {column.name: column.metric for column in declared if column.metric is not None and column.metric != "mean"}


def row_schema(declared: Sequence[ExtraColumn]) -> tuple[FieldSpec, ...]:
    """A run's rows, from rollout to loss, with an environment's own columns."""
    return (*fields.ROW_SCHEMA, *(column.spec for column in declared))

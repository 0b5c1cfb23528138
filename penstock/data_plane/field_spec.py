"""`FieldSpec`: what one field of a partition's rows holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.errors import DataPlaneError
from penstock.runtime.wire.crossing import crosses

FLOATING: Final = "floating"
"""A dtype that stands for all floating-point ones: the writer computes in the model's."""
_WHOLE = ("int64", "int32", "int16", "int8", "uint8", "bool")
_REAL = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES: Final = frozenset((*_WHOLE, *_REAL, "complex64", "complex128"))
"""Names of the dtypes that a tensor column may have."""


@crosses
class FieldKind(Enum):
    """How the values of a field are laid out over its rows."""

    PER_TOKEN = "per_token"
    """A tensor per row, `[length, ...]`; lengths differ from row to row. Stored jagged (`JaggedColumn`)."""
    FIXED = "fixed"
    """A tensor per row, of one shape for all rows of a put; one number per row is the simplest."""
    OBJECT = "object"
    """Text, None, or what JSON can express, per row (`ObjectColumn`)."""


@crosses
@dataclass(frozen=True)
class FieldSpec:
    """One field: its name, its kind, and the dtype of its values.

    Example: `FieldSpec("reward", FieldKind.FIXED, "float32")`, `FieldSpec("response_text", FieldKind.OBJECT)`.
    """

    name: str
    kind: FieldKind
    dtype: str | None = None
    """A dtype's name, such as `int64`, or `floating`; None for objects, and only for these."""

    def __post_init__(self) -> None:
        if type(self.name) is not str or not isinstance(self.kind, FieldKind):
            raise DataPlaneError(f"a field has a name and a FieldKind; got {self.name!r} and {self.kind!r}")
        if self.kind is FieldKind.OBJECT:
            if self.dtype is not None:
                raise DataPlaneError(f"field {self.name!r} holds objects and cannot have the dtype {self.dtype}")
        elif self.dtype != FLOATING and self.dtype not in DTYPES:
            raise DataPlaneError(f"field {self.name!r}: dtype {self.dtype!r} is none of {FLOATING}, {sorted(DTYPES)}")

    def __str__(self) -> str:
        kind = self.kind.value.replace("_", "-")
        return kind if self.dtype is None else f"{kind} {self.dtype}"


def per_token(name: str, dtype: str) -> FieldSpec:
    """A field with one value per token."""
    return FieldSpec(name, FieldKind.PER_TOKEN, dtype)


def fixed(name: str, dtype: str) -> FieldSpec:
    """A field with one value, or one tensor of fixed shape, per row."""
    return FieldSpec(name, FieldKind.FIXED, dtype)


def objects(name: str) -> FieldSpec:
    """A field with text or something JSON-like per row."""
    return FieldSpec(name, FieldKind.OBJECT)

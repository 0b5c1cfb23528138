"""Values that are the same after a trip through JSON: what object columns and tags may hold on every adapter."""

from __future__ import annotations

from typing import Any

_LEAVES = frozenset({type(None), bool, int, float, str})
_DEEPEST = 64
_LARGEST_INT_BITS = 8192
"""Well below what Python converts to text and back."""


def problem_with(value: Any) -> str | None:
    """Why a value would not come back equal, or None if it would.

    Types are compared exactly: a subclass, such as numpy's float64 or an enum, would come back as its base.
    """
    return _problem(value, 0)


def _problem(value: Any, depth: int) -> str | None:
    kind = type(value)
    if kind in _LEAVES:
        return (
            f"an int of {value.bit_length()} bits" if kind is int and value.bit_length() > _LARGEST_INT_BITS else None
        )
    if depth == _DEEPEST:
        return f"nested more than {_DEEPEST} deep"
    if kind is list:
        return _first(value, depth)
    if kind is dict:
        stranger = next((key for key in value if type(key) is not str), None)
        return _first(value.values(), depth) if stranger is None else f"a dict with the key {stranger!r}"
    return f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def _first(values: Any, depth: int) -> str | None:
    return next((found for each in values if (found := _problem(each, depth + 1)) is not None), None)

"""What may cross between a run and its reward processes: plain data, as JSON text. Nothing is ever unpickled.

Text, numbers, booleans, None, lists and dicts with text keys are already JSON. Tuples, sets, other dicts, bytes, dates,
times and decimals keep their types. Numpy's and torch's single numbers arrive as plain numbers. Anything else cannot
cross.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType
from typing import Any

_MARK = "$"
"""Begins the only key of an object that stands for something JSON cannot express."""

_AS_TEXT: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    dt.datetime: ("$datetime", dt.datetime.isoformat, dt.datetime.fromisoformat),
    dt.date: ("$date", dt.date.isoformat, dt.date.fromisoformat),
    dt.time: ("$time", dt.time.isoformat, dt.time.fromisoformat),
    Decimal: ("$decimal", str, Decimal),
}
_AS_LIST: dict[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("$tuple", tuple),
    set: ("$set", set),
    frozenset: ("$frozenset", frozenset),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    **{mark: read for mark, _, read in _AS_TEXT.values()},
    **dict(_AS_LIST.values()),
}


class NotPlain(TypeError):
    """A value that is not plain data; the message says which."""


def encode(value: Any) -> str:
    """One line of JSON; raises `NotPlain`."""
    try:
        return json.dumps(_marked(value))
    except (ValueError, RecursionError) as error:  # a number too long, or a list that holds itself
        raise NotPlain(str(error)) from error


def decode(text: str | bytes) -> Any:
    """What was encoded."""
    return json.loads(text, object_hook=_unmarked)


def as_numbers(value: Any) -> Any:
    """A reward with numbers of libraries, fractions and arrays in it, as plain numbers, lists and dicts."""
    if isinstance(value, dict | MappingProxyType):
        return {key: as_numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_numbers(each) for each in value]
    if len(getattr(value, "shape", ())) and hasattr(value, "tolist"):
        listed = value.tolist()
        return listed[0] if len(listed) == 1 else listed
    return float(value) if hasattr(value, "__float__") and not isinstance(value, int | float) else value


def _marked(value: Any) -> Any:
    kind = type(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if kind is list:
        return [_marked(each) for each in value]
    if isinstance(value, dict | MappingProxyType):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: _marked(each) for key, each in value.items()}
        return {"$dict": [[_marked(key), _marked(each)] for key, each in value.items()]}
    if kind in _AS_LIST:
        return {_AS_LIST[kind][0]: [_marked(each) for each in value]}
    if kind in _AS_TEXT:
        mark, write, _ = _AS_TEXT[kind]
        return {mark: write(value)}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _marked(value.item())
    raise NotPlain(f"a value of type {kind.__module__}.{kind.__qualname__} is not plain data")


def _unmarked(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        [(mark, content)] = value.items()
        if mark in _READERS:
            return _READERS[mark](content)
    return value

"""Text that any file can hold: what data, environments and errors say, made safe to write.

A Python string can hold halves of surrogate pairs; JSON may spell one, as `"\\ud800"`. No encoding can represent them:
a single one would keep a whole checkpoint from being written. All other characters are text, even control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
LONGEST_ERROR = 2_000
"""How many characters of an error's message are kept."""


def safe(text: str) -> str:
    """`text` with U+FFFD in place of every surrogate; the text itself if there is none."""
    return text if text.isascii() else _SURROGATE.sub(_REPLACEMENT, text)


def is_safe(value: Any) -> bool:
    """Whether no text in `value`, or in its lists, tuples and mappings, has a surrogate."""
    todo, seen = [value], set[int]()
    while todo:
        found = todo.pop()
        if isinstance(found, str):
            if not found.isascii() and _SURROGATE.search(found):
                return False
        elif isinstance(found, Mapping | list | tuple) and id(found) not in seen:
            seen.add(id(found))
            todo.extend(_parts(found))
    return True


def safe_value(value: Any) -> Any:
    """`value` with all text in it, in its lists, tuples and mappings made safe; the same object if it already is."""
    return value if is_safe(value) else _made_safe(value)


def cut(text: str, most: int) -> str:
    """`text`, or its first `most` characters and how many are missing."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def error_text(error: BaseException) -> str:
    """What an error says, safe and short, even if its `__str__` fails."""
    try:
        return cut(safe(str(error)), LONGEST_ERROR)
    except Exception as problem:  # noqa: BLE001 - `__str__` belongs to whoever wrote the error
        return f"(its text is not available: {type(problem).__name__})"


def repr_text(value: Any) -> str:
    """`repr(value)`, even if that fails."""
    try:
        return repr(value)
    except Exception as problem:  # noqa: BLE001 - `__repr__` belongs to whoever wrote the class
        return f"({type(value).__name__}, whose repr is not available: {type(problem).__name__})"


def named_error(error: BaseException) -> str:
    """An error's type and what it says, if anything."""
    name, text = safe(type(error).__name__), error_text(error)
    return f"{name}: {text}" if text else name


def _parts(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return (*value.keys(), *value.values()) if isinstance(value, Mapping) else value


def _made_safe(value: Any) -> Any:
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, Mapping):
        return {_made_safe(key): _made_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_made_safe(item) for item in value]
    return tuple(map(_made_safe, value)) if isinstance(value, tuple) else value

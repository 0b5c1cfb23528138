"""Values that no setting may have, wherever they come from: what could not be written into `config.yaml` or used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.config.reading.keys import dotted, join
from penstock.text import is_safe, safe

_DEEPEST = 50
_LARGEST = 10**300
_LONGEST_NAME = 255
"""Bytes of a file's or folder's name that every usual file system takes."""
_LONGEST_PATH = 3_500
"""Bytes of a path; the operating system takes 4,096, and runs put files with names of their own below theirs."""


def is_import_path(value: str) -> str:
    """The value, which names code as `module:thing`; `ValueError` where it does not."""
    if value.count(":") != 1 or not all(value.split(":")):
        raise ValueError(f"{value!r} is not module:thing; write it as in my_project.losses:my_loss")
    return value


def unusable(settings: Mapping[str, Any]) -> list[str]:
    """One `key: reason` line for each value that is no text, no number, or no tree."""
    return list(_problems(settings, (), (), set()))


def _problems(value: Any, names: tuple[str, ...], around: tuple[int, ...], seen: set[int]) -> Iterator[str]:
    """Those of a value at `names` inside the values `around`; one that was `seen` elsewhere is not looked at again."""
    key = safe(dotted(names))
    if isinstance(value, str):
        if not is_safe(value):
            yield f"{key}: has half of a surrogate pair (\\ud800 to \\udfff), which is not a character; remove it"
    elif isinstance(value, int):
        if abs(value) >= _LARGEST:
            yield f"{key}: is a whole number of more than 300 digits"
    elif id(value) in around:
        yield f"{key}: contains itself"
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        if len(names) >= _DEEPEST:
            yield f"{safe(dotted(names[:3]))}: is nested too deeply: more than {_DEEPEST} levels"
            return
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in pairs:
            if isinstance(name, str) and not is_safe(name):
                yield f"{join(key, safe(name))}: has half of a surrogate pair in its name; remove it"
            else:
                yield from _problems(item, (*names, str(name)), (*around, id(value)), seen)
        seen.add(id(value))


def usable_path(value: str | None) -> str | None:
    """The value, for settings that are paths; `ValueError` where no file could ever have that path."""
    if value is None:
        return None
    if not value.strip():
        raise ValueError("is empty; give a path")
    if "\0" in value:
        raise ValueError("contains a NUL character, which no path can have")
    path = os.fsencode(value)
    longest = max(len(name) for name in path.split(os.fsencode(os.sep)))
    if longest > _LONGEST_NAME:
        raise ValueError(f"has a name of {longest:,} bytes in it; at most {_LONGEST_NAME} are possible")
    if len(path) > _LONGEST_PATH:
        raise ValueError(f"is a path of {len(path):,} bytes; at most {_LONGEST_PATH:,} are possible")
    return value


def component_name(name: str | None, import_path: str) -> str:
    """What a reward among several is called: the name it was given, else that of its function."""
    return name if name is not None else import_path.rpartition(":")[2]

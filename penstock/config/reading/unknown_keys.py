"""Lines about keys that no model has: what they are called now, what another system's are called here, or a guess."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.config.other_names.answers import answer
from penstock.config.other_names.ours import RENAMED, RENAMED_VALUES
from penstock.config.reading.keys import Location, all_keys, join
from penstock.config.sections.base import Section
from penstock.text import cut

_LONGEST_NAME = 100
"""Characters of a name that no setting has: what a file holds by mistake may be of any length."""
_MOST_LINES = 40
"""Lines about what is in one section."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that looks most like `name`, if any does."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_key(where: Location, value: Any, root: type[Section]) -> Iterator[str]:
    """The line for a key no model knows; for a section that others have, one for each setting in it that is known."""
    if where.key in RENAMED:
        yield from renamed(where.key, value)
        return
    below = list(_said_below(where.key, value))
    if below:
        yield from below
    else:
        yield _unknown_setting(where, answer(where.key.split("."), value), where.holder or root, root)


def renamed(key: str, value: Any) -> Iterator[str]:
    """The line for a key that has another name now; of a section, one for each setting in it."""
    if isinstance(value, dict) and value and any(old.startswith(f"{key}.") for old in RENAMED):
        for name, below in value.items():
            yield from renamed(join(key, str(name)), below)
    elif key in RENAMED:
        now = RENAMED[key]
        new_value = RENAMED_VALUES.get(now, {}).get(value) if isinstance(value, str) else None
        too = f", and `{value}` is `{new_value}`" if new_value else ""
        yield f"{key}: unknown setting; `{key}` is `{now}` here{too}"
    else:
        section = key.rpartition(".")[0]
        yield f"{cut(key, _LONGEST_NAME)}: unknown setting; `{section}` is `{RENAMED[section]}` here"


def _unknown_setting(where: Location, said: str | None, holder: type[Section], root: type[Section]) -> str:
    key = join(where.prefix, cut(where.name, _LONGEST_NAME))
    if said:
        close = nearest(where.name, holder.model_fields, cutoff=0.75)
        typo = join(where.prefix, close) if close else ""
        return f"{key}: unknown setting; {said}" + (f"; or did you mean {typo}?" if typo and typo not in said else "")
    meant = _meant(where.name, where.prefix, holder, root)
    if meant:
        return f"{key}: unknown setting; did you mean {meant}?"
    owner = where.prefix or "a configuration"
    return f"{key}: unknown setting; {owner} has {', '.join(holder.model_fields)}"


def _said_below(key: str, value: Any) -> Iterator[str]:
    """What other systems' settings in a section are called here, and which of them nobody knows."""
    leaves = list(_leaves(key.split("."), value)) if isinstance(value, dict) else []
    said = {path: found for path, below in leaves if (found := answer(path, below))}
    if not said:
        return
    for path, found in list(said.items())[:_MOST_LINES]:
        yield f"{cut('.'.join(path), _LONGEST_NAME)}: unknown setting; {found}"
    others = [".".join(path) for path, _ in leaves if path not in said]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        yield f"{key}: unknown setting; nothing here is called {', '.join(cut(name, 60) for name in others[:5])}{more}"


def _leaves(path: list[str], value: dict[Any, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Names and values in nested mappings; a mapping none of whose names is known is a value itself."""
    for name, below in value.items():
        here = [*path, str(name)]
        inside = list(_leaves(here, below)) if isinstance(below, dict) else []
        if any(answer(found, leaf) for found, leaf in inside):
            yield from inside
        else:
            yield tuple(here), below


def _meant(name: str, prefix: str, holder: type[Section], root: type[Section]) -> str | None:
    close = nearest(name, holder.model_fields, cutoff=0.75)
    if close:
        return join(prefix, close)
    keys = list(dict.fromkeys(all_keys(root)))
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    if len(same_name) == 1:
        return same_name[0]
    close = nearest(name, holder.model_fields)
    if close:
        return join(prefix, close)
    leaf = nearest(name, {key.rpartition(".")[2] for key in keys}, cutoff=0.8)
    elsewhere = [key for key in keys if key.rpartition(".")[2] == leaf]
    return elsewhere[0] if len(elsewhere) == 1 else None

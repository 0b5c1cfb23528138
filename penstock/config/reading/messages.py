"""Pydantic's errors as lines a person can act on: the dotted key, the reason, the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.config.other_names.ours import RENAMED, RENAMED_VALUES
from penstock.config.other_names.values import ALGORITHMS, foreign_value
from penstock.config.reading.keys import Location, join, locate, required_keys
from penstock.config.reading.unknown_keys import nearest, renamed, unknown_key
from penstock.config.sections.base import Section
from penstock.text import cut

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to values",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_LONGEST_LINE = 1_000
"""Characters of a line: what a file holds by mistake may be of any length."""
_TYPO = 0.85
"""How alike a name is to what is a typo of it: one or two letters of a long name, none of `grpo` or `gspo`."""


def problems_of(error: ValidationError, root: type[Section]) -> list[str]:
    """One `key: reason` line per wrong setting, in the order of the file."""
    lines: list[str] = []
    for details in error.errors(include_url=False):
        found = [cut(line, _LONGEST_LINE) for line in _lines(details, root)]
        lines += [line for line in found if line not in lines]
    return lines


def show(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lines(details: ErrorDetails, root: type[Section]) -> Iterator[str]:
    where = locate(root, details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "value_error":
        reason = str(context["error"])
        yield from (f"{where.key}: {line}" if where.key else line for line in reason.splitlines())
    elif kind == "extra_forbidden":
        yield from _extra(where, value, root)
    elif kind == "missing":
        yield from _missing(where, value, locate(root, details["loc"][:-1]))
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield from _wrong_kind(where, value)
    elif kind in ("model_type", "model_attributes_type", "dict_type") and where.spec and where.spec.sections:
        yield f"{where.key}: {_not_a_section(where, value)}"
    else:
        yield f"{where.key}: {_wrong_value(kind, value, context, where, details['msg'])}"


def _wrong_value(kind: str, value: Any, context: dict[str, Any], where: Location, message: str) -> str:
    if kind == "literal_error" and where.spec:
        names = [str(name) for name in _literal_names(where.spec.annotation)]
        now = RENAMED_VALUES.get(where.key, {}).get(value) if isinstance(value, str) else None
        return f"`{value}` is `{now}` here" if now else unknown_name(value, names, where.key)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, got {show(value)}"
    if kind == "too_long":
        return f"takes {context['max_length']} values, got {context['actual_length']}"
    if kind == "finite_number":
        return f"must be a finite number, got {show(value)}"
    if kind == "invalid_key":
        return "the name of a setting must be text; put it in quotes"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {show(value)}{_hint(kind, value)}"
    return message[:1].lower() + message[1:]


def unknown_name(value: Any, names: Sequence[str], key: str = "") -> str:
    """The reason for a value of the setting `key` that is not one of `names`.

    What another system calls so comes first, then a guess; algorithms are guessed only where it can only be a typo.
    """
    if len(names) == 1:
        return f"unknown {show(value)}; the only choice is {names[0]}"
    listed = ", ".join(names)
    if said := foreign_value(key, value):
        return f"unknown {show(value)}; {said} (one of {listed})"
    match = nearest(value, names, cutoff=_TYPO if key in ALGORITHMS else 0.6) if isinstance(value, str) else None
    return f"unknown {show(value)}; " + (f"did you mean {match}? (one of {listed})" if match else f"one of {listed}")


def _hint(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if _EXPECTED[kind] == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if isinstance(value, str) and _EXPECTED[kind] != "text" and _looks_like(kind, value):
        return "; remove the quotes"
    return ""


def _looks_like(kind: str, text: str) -> bool:
    if _EXPECTED[kind] == "true or false":
        return text.lower() in ("true", "false")
    try:
        number = float(text)
    except ValueError:
        return False
    return _EXPECTED[kind] == "a number" or number.is_integer()


def _extra(where: Location, value: Any, root: type[Section]) -> Iterator[str]:
    owners = [kind for kind, section in where.alternatives.items() if where.name in section.model_fields]
    if not owners or where.holder is None:
        yield from unknown_key(where, value, root)
        return
    kind = next(name for name, section in where.alternatives.items() if section is where.holder)
    own = [name for name in where.holder.model_fields if name != where.tag]
    has = f"it has {', '.join(own)}" if own else "it has no settings"
    belongs = f"{where.name} belongs to {', '.join(owners)}"
    yield f"{where.key}: is not a setting of {where.tag} = {kind}; {has} ({belongs})"


def _missing(where: Location, value: Any, around: Location) -> Iterator[str]:
    if where.holder is None and around.spec:  # an element of a list of fixed length
        yield f"{around.key}: takes {len(get_args(around.spec.annotation))} values, got {len(value)}"
        return
    if where.spec and len(where.spec.sections) == 1:
        for key, description in required_keys(where.spec.sections[0], where.key):
            yield _required(key, description)
        return
    fields = where.holder.model_fields if where.holder else {}
    yield _required(where.key, fields[where.name].description or "" if where.name in fields else "")


def _required(key: str, description: str) -> str:
    return f"{key}: is required. {description}" if description else f"{key}: is required"


def _wrong_kind(where: Location, value: Any) -> Iterator[str]:
    assert where.spec is not None
    kinds, tag = list(where.spec.kinds()), where.spec.tag
    key = join(where.key, tag)
    if isinstance(value, dict) and tag not in value:
        old = {full: below for name, below in value.items() if (full := join(where.key, str(name))) in RENAMED}
        for name, below in old.items():
            yield from renamed(name, below)
        if key not in map(RENAMED.get, old):
            yield f"{key}: is required; one of {', '.join(kinds)}"
    else:
        yield f"{key}: {unknown_name(value[tag] if isinstance(value, dict) else value, kinds, key)}"


def _not_a_section(where: Location, value: Any) -> str:
    assert where.spec is not None
    if where.spec.is_choice:
        kinds, tag = ", ".join(where.spec.kinds()), where.spec.tag
        example = f"{{{tag}: {value}}}" if value in list(where.spec.kinds()) else f"{{{tag}: ...}}"
        return f"expected a section such as {example} with one of {kinds}, got {show(value)}"
    names = ", ".join(where.spec.sections[0].model_fields)
    if value is None:
        return f"is empty; remove it, or set some of {names}"
    return f"expected a section with some of {names}, got {show(value)}"


def _literal_names(annotation: Any) -> tuple[Any, ...]:
    return tuple(name for part in get_args(annotation) for name in (get_args(part) or (part,)) if name is not None)

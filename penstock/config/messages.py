"""Pydantic's findings as lines a person can act on: the dotted key, the reason, the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.config.base import Section
from penstock.config.keys import Location, all_keys, join, locate, required_keys
from penstock.config.renamed import RENAMED, RENAMED_VALUES
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
_LONGEST_LINE, _LONGEST_NAME = 1_000, 100
"""Characters of a line, and of a name that no setting has: what a file holds by mistake may be of any length."""
ALIASES = {
    "batch_size": "training.prompt_groups_per_step",
    "learning_rate": "training.optimizer.lr",
    "max_tokens": "rollout.sampling.max_new_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "model_name": "model.path",
    "model_path": "model.path",
    "name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_epochs": "data.epochs",
    "output_dir": "run_dir",
}
"""Names that other trainers have for a setting, and what it is called here."""


def problems_of(error: ValidationError, root: type[Section]) -> list[str]:
    """One `key: reason` line per wrong setting, in the order of the file."""
    lines: list[str] = []
    for details in error.errors(include_url=False):
        found = [cut(line, _LONGEST_LINE) for line in _lines(details, root)]
        lines += [line for line in found if line not in lines]
    return lines


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that looks most like `name`, if any does."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_setting(name: str, prefix: str, holder: type[Section], root: type[Section]) -> str:
    """The line for a key no model knows, with the setting that was probably meant."""
    key = join(prefix, cut(name, _LONGEST_NAME))
    meant = _meant(name, prefix, holder, root)
    if meant:
        return f"{key}: unknown setting; did you mean {meant}?"
    owner = prefix or "a configuration"
    return f"{key}: unknown setting; {owner} has {', '.join(holder.model_fields)}"


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
    elif kind in ("model_type", "model_attributes_type", "dict_type") and where.place and where.place.sections:
        yield f"{where.key}: {_not_a_section(where, value)}"
    else:
        yield f"{where.key}: {_wrong_value(kind, value, context, where, details['msg'])}"


def _wrong_value(kind: str, value: Any, context: dict[str, Any], where: Location, message: str) -> str:
    if kind == "literal_error" and where.place:
        names = [str(name) for name in _literal_names(where.place.annotation)]
        now = RENAMED_VALUES.get(where.key, {}).get(value) if isinstance(value, str) else None
        return f"`{value}` is `{now}` here" if now else unknown_name(value, names)
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


def unknown_name(value: Any, names: Sequence[str]) -> str:
    """The reason for a value that is not one of `names`."""
    if len(names) == 1:
        return f"unknown {show(value)}; the only choice is {names[0]}"
    match = nearest(value, names) if isinstance(value, str) else None
    listed = ", ".join(names)
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
    if where.key in RENAMED:
        yield from _renamed(where.key, value)
    else:
        yield _not_a_setting(where, root)


def _renamed(key: str, value: Any) -> Iterator[str]:
    """The line for a key that has another name now; of a section, one for each setting in it."""
    if isinstance(value, dict) and value and any(old.startswith(f"{key}.") for old in RENAMED):
        for name, below in value.items():
            yield from _renamed(join(key, str(name)), below)
    elif key in RENAMED:
        now = RENAMED[key]
        renamed = RENAMED_VALUES.get(now, {}).get(value) if isinstance(value, str) else None
        too = f", and `{value}` is `{renamed}`" if renamed else ""
        yield f"{key}: unknown setting; `{key}` is `{now}` here{too}"
    else:
        section = key.rpartition(".")[0]
        yield f"{cut(key, _LONGEST_NAME)}: unknown setting; `{section}` is `{RENAMED[section]}` here"


def _not_a_setting(where: Location, root: type[Section]) -> str:
    holder = where.holder or root
    owners = [kind for kind, section in where.alternatives.items() if where.name in section.model_fields]
    if not owners:
        return unknown_setting(where.name, where.prefix, holder, root)
    kind = next(name for name, section in where.alternatives.items() if section is holder)
    own = [name for name in holder.model_fields if name != where.tag]
    has = f"it has {', '.join(own)}" if own else "it has no settings"
    belongs = f"{where.name} belongs to {', '.join(owners)}"
    return f"{where.key}: is not a setting of {where.tag} = {kind}; {has} ({belongs})"


def _missing(where: Location, value: Any, around: Location) -> Iterator[str]:
    if where.holder is None and around.place:  # an element of a list of fixed length
        yield f"{around.key}: takes {len(get_args(around.place.annotation))} values, got {len(value)}"
        return
    if where.place and len(where.place.sections) == 1:
        for key, description in required_keys(where.place.sections[0], where.key):
            yield _required(key, description)
        return
    fields = where.holder.model_fields if where.holder else {}
    yield _required(where.key, fields[where.name].description or "" if where.name in fields else "")


def _required(key: str, description: str) -> str:
    return f"{key}: is required. {description}" if description else f"{key}: is required"


def _wrong_kind(where: Location, value: Any) -> Iterator[str]:
    assert where.place is not None
    kinds, tag = list(where.place.kinds()), where.place.tag
    key = join(where.key, tag)
    if isinstance(value, dict) and tag not in value:
        old = {full: below for name, below in value.items() if (full := join(where.key, str(name))) in RENAMED}
        for name, below in old.items():
            yield from _renamed(name, below)
        if key not in map(RENAMED.get, old):
            yield f"{key}: is required; one of {', '.join(kinds)}"
    else:
        yield f"{key}: {unknown_name(value[tag] if isinstance(value, dict) else value, kinds)}"


def _not_a_section(where: Location, value: Any) -> str:
    assert where.place is not None
    if where.place.is_choice:
        kinds, tag = ", ".join(where.place.kinds()), where.place.tag
        example = f"{{{tag}: {value}}}" if value in list(where.place.kinds()) else f"{{{tag}: ...}}"
        return f"expected a section such as {example} with one of {kinds}, got {show(value)}"
    names = ", ".join(where.place.sections[0].model_fields)
    if value is None:
        return f"is empty; remove it, or give it some of {names}"
    return f"expected a section with some of {names}, got {show(value)}"


def _meant(name: str, prefix: str, holder: type[Section], root: type[Section]) -> str | None:
    close = nearest(name, holder.model_fields, cutoff=0.75)
    if close:
        return join(prefix, close)
    keys = list(dict.fromkeys(all_keys(root)))
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    if len(same_name) == 1:
        return same_name[0]
    if name in ALIASES:
        return ALIASES[name]
    close = nearest(name, holder.model_fields)
    if close:
        return join(prefix, close)
    leaf = nearest(name, {key.rpartition(".")[2] for key in keys}, cutoff=0.8)
    elsewhere = [key for key in keys if key.rpartition(".")[2] == leaf]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _literal_names(annotation: Any) -> tuple[Any, ...]:
    return tuple(name for part in get_args(annotation) for name in (get_args(part) or (part,)) if name is not None)

"""What a reward function asks for by the names of its parameters, and whether there is something to give it.

A function is called by keyword, with those of the names below and of the record's columns that its signature has; one
with `**columns` gets every column.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

GIVEN = ("prompt", "messages", "rendered_prompt", "response", "response_ids", "answer")
"""What every reward function can ask for. A column of one of these names does not reach the function by it."""
_OF_UNKNOWN = ("prompt", "response", "answer")
"""What a function gets if its signature is not available."""


class Signature(NamedTuple):
    """The parameters of a function that can be given by keyword; plain data, as it comes from another process."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool
    """Whether it has `**parameters`."""
    unfillable: str | None = None
    """A parameter without a default that no keyword reaches."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those with and those without a default."""
        return self.required + self.optional


def signature_of(function: Callable[..., object]) -> Signature:
    """Inspect a function; nothing is known about some C functions."""
    import inspect  # slow, and needed once

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Signature((), _OF_UNKNOWN, takes_all=False)
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unfillable = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    return Signature(
        tuple(p.name for p in by_keyword if p.default is p.empty),
        tuple(p.name for p in by_keyword if p.default is not p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        unfillable[0] if unfillable else None,
    )


def wanted_names(signature: Signature, args: Mapping[str, Any], columns: Iterable[str]) -> tuple[str, ...]:
    """What to give a function in addition to `args`, which precede columns: the `GIVEN` it names, and columns."""
    own = [name for name in GIVEN if name in signature.names or signature.takes_all]
    others = [name for name in columns if name not in GIVEN and name not in args]
    return (*own, *(name for name in others if name in signature.names or signature.takes_all))


class Supply(NamedTuple):
    """What can be given to a function in addition to `GIVEN`."""

    args: Mapping[str, Any]
    args_key: str
    """The setting that holds them."""
    columns: Sequence[str]
    """Those that every record has."""
    lacking: Mapping[str, str]
    """Columns that only some records have, and the id of a prompt whose record has not."""


def problems_of(path: str, key: str, signature: Signature, supply: Supply) -> list[str]:
    """Why a function cannot be called, one line for each reason; `key` is the setting that names it."""
    if signature.unfillable is not None:
        return [f"{key}: {path} has a positional-only parameter {signature.unfillable!r}; it is called by keyword"]
    problems = []
    for name in supply.args:
        if name in GIVEN:
            problems.append(f"{supply.args_key}.{name}: every reward function is given {name!r}; use another name")
        elif name not in signature.names and not signature.takes_all:
            has = ", ".join(signature.names) or "none"
            problems.append(f"{supply.args_key}.{name}: {path} has no parameter of this name (it has {has})")
    for name in signature.required:
        if name not in GIVEN and name not in supply.args and name not in supply.columns:
            problems.append(
                f"{key}: {path} has a parameter {name!r} without a default, and {_unsupplied(name, supply)}"
            )
    return problems


def _unsupplied(name: str, supply: Supply) -> str:
    if name in supply.lacking:
        return (
            f"the record of prompt {supply.lacking[name]} has no such column; give the parameter a default, or every "
            "record the column"
        )
    close = difflib.get_close_matches(name, [*GIVEN, *supply.columns], n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    columns, args = ", ".join(supply.columns) or "none", ", ".join(supply.args) or "nothing"
    return (
        f"nothing supplies it: it is neither a column that every record of the data has ({columns}), nor in "
        f"{supply.args_key} ({args}), nor one of {', '.join(GIVEN)}{hint}"
    )

"""What user code raised, as plain data that crosses from a reward process, and as an exception again.

Texts are cut and made safe where they are made: an exception with megabytes of text costs the run nothing, and none
brings text that cannot be written to a file.
"""

from __future__ import annotations

import importlib
from typing import Any

from penstock.text import named_error

_DEEPEST = 8
"""How far causes are followed, and how many members of a group are told."""

_KNOWN = {
    "TimeoutError": "builtins",
    "ConnectionError": "builtins",
    "EOFError": "builtins",
    "MemoryError": "builtins",
    "gaierror": "socket",
    "OSError": "builtins",
    "BrokenExecutor": "concurrent.futures._base",
}
"""Classes that say whose fault an error is (`penstock.controller.failure`), and their modules; they survive the
crossing. By name, as a reward process does not import what user code has no need of."""


def told(error: BaseException, depth: int = _DEEPEST) -> dict[str, Any]:
    """An error and what led to it, as plain data."""
    kind = getattr(getattr(error, "failure_kind", None), "value", None)
    number = getattr(error, "errno", None)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return {
        "text": named_error(error),
        "class": next((base.__name__ for base in type(error).__mro__ if _is_known(base)), None),
        "errno": number if isinstance(number, int) else None,
        "kind": kind if isinstance(kind, str) else None,
        "members": [told(member, depth - 1) for member in members[:_DEEPEST]] if depth else [],
        "cause": told(cause, depth - 1) if cause is not None and depth else None,
    }


def as_exception(error: dict[str, Any]) -> Exception:
    """An exception with the name, the text and the causes of one that was told, and of as known a class."""
    from penstock.errors import FailureKind

    name, _, text = error["text"].partition(": ")
    if error["members"]:
        raised: Exception = ExceptionGroup(text, [as_exception(member) for member in error["members"]])
    else:
        base = _class(error["class"])
        marks = {} if error["kind"] is None else {"failure_kind": FailureKind(error["kind"])}
        raised = type(name, (base,), marks)(text)
    if isinstance(raised, OSError):
        raised.errno = error["errno"]
    raised.__cause__ = None if error["cause"] is None else as_exception(error["cause"])
    return raised


def _is_known(base: type) -> bool:
    return _KNOWN.get(base.__name__) == base.__module__


def _class(name: str | None) -> type[Exception]:
    if name is None:
        return Exception
    return getattr(importlib.import_module(_KNOWN[name]), name)  # type: ignore[no-any-return]

"""What user code raised, as plain data that crosses from a reward process, and as an exception again.

Texts are cut and made safe where they are made: an exception with megabytes of text costs the run nothing, and none
brings text that cannot be written to a file. Where user code raised crosses as text too, frame by frame.
"""

from __future__ import annotations

import importlib
from typing import Any

from penstock.errors import EnvironmentFailure, UserTrace
from penstock.text import LONGEST_ERROR, cut, named_error, safe
from penstock.user_frames import Frame, frames_in, frames_of, innermost, is_own, shown

_DEEPEST = 8
"""How far causes are followed, and how many members of a group are reported."""

_LONGEST_TRACEBACK = 8_000

_KNOWN = {
    "TimeoutError": "builtins",
    "ConnectionError": "builtins",
    "EOFError": "builtins",
    "MemoryError": "builtins",
    "gaierror": "socket",
    "OSError": "builtins",
    "BrokenExecutor": "concurrent.futures._base",
}
"""Classes that say whose fault an error is (`penstock.controller.failures.classify`), and their modules; they survive
the crossing. By name, since a reward process does not import what user code does not need."""


def told(error: BaseException, depth: int = _DEEPEST, *, with_frames: bool = True) -> dict[str, Any]:
    """An error and what led to it, as plain data; of a group's members, only the first has frames."""
    kind = getattr(getattr(error, "failure_kind", None), "value", None)
    number = getattr(error, "errno", None)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    user_frames = frames_of(error.__traceback__) if with_frames else []
    return {
        "text": named_error(error),
        "class": next((base.__name__ for base in type(error).__mro__ if _is_known(base)), None),
        "errno": number if isinstance(number, int) else None,
        "kind": kind if isinstance(kind, str) else None,
        "frames": [safe(frame) for frame in shown(user_frames)],
        "at": innermost(user_frames),
        "members": [
            told(member, depth - 1, with_frames=with_frames and number == 0)
            for number, member in enumerate(members[:_DEEPEST])
        ]
        if depth
        else [],
        "cause": told(cause, depth - 1, with_frames=with_frames) if cause is not None and depth else None,
    }


def told_by_others(name: str, message: str, traceback: str | None) -> dict[str, Any]:
    """An error that a library has caught, of which only its name, text and printed traceback remain."""
    user_frames = frames_in(traceback or "")
    text = cut(safe(f"{name}: {message}"), LONGEST_ERROR)
    frames = [safe(frame) for frame in shown(user_frames)]
    return {"text": text, "frames": frames, "at": innermost(user_frames), "members": [], "cause": None}


def raised_by_user(what: str, error: BaseException | dict[str, Any], printed: str = "") -> EnvironmentFailure:
    """The failure of `what`, whose code raised an error, here or in a process: in one line, and with its frames."""
    said = error if isinstance(error, dict) else told(error)
    frame = _innermost(said)
    where = "" if frame is None else f" ({frame[0].rpartition('/')[2]}, line {frame[1]}, in {frame[2]})"
    failure = EnvironmentFailure(f"{what} raised {said['text']}{safe(where)}{printed}")
    name = said["text"].partition(":")[0]
    at = "" if frame is None else f" at {frame[0]}:{frame[1]} in {frame[2]}"
    failure.trace = UserTrace(safe(f"{name}{at}"), cut(_traceback(said), _LONGEST_TRACEBACK))
    return failure


def _innermost(said: dict[str, Any]) -> Frame | None:
    """The innermost line of user code; if a library's line is last, the line of the error that led to it.

    Of a group, it is that of its first member.
    """
    found = [_innermost(said["members"][0])] if said["members"] else []
    found.append(said["at"])
    if said["cause"] is not None:
        found.append(_innermost(said["cause"]))
    found_frames = [frame for frame in found if frame is not None]
    return next((frame for frame in found_frames if is_own(frame[0])), found_frames[0] if found_frames else None)


def _traceback(said: dict[str, Any]) -> str:
    before = f"{_traceback(said['cause'])}\nThis led to:\n\n" if said["cause"] is not None else ""
    head = "Traceback (most recent call last):\n" if said["frames"] else ""
    text = f"{before}{head}{''.join(said['frames'])}{said['text']}\n"
    for member in said["members"][:1]:
        text += f"\nThe first of its errors:\n\n{_traceback(member)}"
    return text


def as_exception(error: dict[str, Any]) -> Exception:
    """An exception with the name, the text and the causes of a reported one, and of the same known class."""
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

"""The lines of user code that an error came through: a traceback without its callers' frames."""

from __future__ import annotations

import os
from types import TracebackType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_CALLERS = (
    _OURS,
    *(f"{_LIBRARY}{name}" for name in ("asyncio" + os.sep, "concurrent" + os.sep, "threading.py", "contextlib.py")),
    "<frozen importlib",
)
"""Path prefixes of files whose frames say nothing about the user's code."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FIRST, _LAST = 4, 12
"""How many frames of a long traceback are kept."""
_LONGEST_LINE = 200

Frame = tuple[str, int, str]
"""File, line and function."""


def frames_of(traceback: TracebackType | None) -> list[Frame]:
    """The frames of an error, outermost first, without those of Penstock, asyncio and threads."""
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return [frame for frame in frames if not frame[0].startswith(_CALLERS)]


def frames_in(traceback: str) -> list[Frame]:
    """The same for a traceback that something else has printed, including the errors that led to it."""
    import re  # needed only if something was raised

    found = re.findall(r'^\s*File "(.+?)", line (\d+), in (.+)$', traceback, re.MULTILINE)
    return [(file, int(line), name) for file, line, name in found if not file.startswith(_CALLERS)]


def innermost(frames: list[Frame]) -> Frame | None:
    """The last line of the user's own code; if there is none, the last line of a library."""
    own = [frame for frame in frames if is_own(frame[0])] or frames
    return own[-1] if own else None


def shown(frames: list[Frame]) -> list[str]:
    """The frames as Python prints them; if there are very many, the first and the last ones."""
    import linecache  # needed only if something was raised

    def printed(frame: Frame) -> str:
        file, line, function = frame
        source = linecache.getline(file, line).strip()[:_LONGEST_LINE]
        return f'  File "{file}", line {line}, in {function}\n' + (f"    {source}\n" if source else "")

    left_out = len(frames) - _FIRST - _LAST
    if left_out <= 0:
        return list(map(printed, frames))
    return [*map(printed, frames[:_FIRST]), f"  … {left_out} frames …\n", *map(printed, frames[-_LAST:])]


def is_own(file: str) -> bool:
    """Whether a file is not in the standard library, not installed, and not a made-up name, as of code in a string."""
    return not (file.startswith((_LIBRARY, "<")) or any(part in file for part in _INSTALLED))

"""The lines of user code that an error came through: a traceback without the frames of those who called it."""

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
"""Begin the names of files whose frames say nothing about the user's code."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FIRST, _LAST = 4, 12
"""Frames that are kept of a long traceback."""
_LONGEST_LINE = 200

Place = tuple[str, int, str]
"""File, line and function."""


def user_places(traceback: TracebackType | None) -> list[Place]:
    """The frames of an error, outermost first, without those of Penstock, asyncio and threads."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return [place for place in places if not place[0].startswith(_CALLERS)]


def user_places_in(traceback: str) -> list[Place]:
    """The same of a traceback that somebody else has printed, with the errors that led to it."""
    import re  # needed where something was raised only

    found = re.findall(r'^\s*File "(.+?)", line (\d+), in (.+)$', traceback, re.MULTILINE)
    return [(file, int(line), name) for file, line, name in found if not file.startswith(_CALLERS)]


def innermost(places: list[Place]) -> Place | None:
    """The last line of the user's own code; where there is none, the last of a library's."""
    own = [place for place in places if is_own(place[0])] or places
    return own[-1] if own else None


def shown(places: list[Place]) -> list[str]:
    """The frames as Python prints them; of very many the first and the last."""
    import linecache  # needed where something was raised only

    def frame(place: Place) -> str:
        file, line, function = place
        source = linecache.getline(file, line).strip()[:_LONGEST_LINE]
        return f'  File "{file}", line {line}, in {function}\n' + (f"    {source}\n" if source else "")

    left_out = len(places) - _FIRST - _LAST
    if left_out <= 0:
        return list(map(frame, places))
    return [*map(frame, places[:_FIRST]), f"  … {left_out} frames …\n", *map(frame, places[-_LAST:])]


def is_own(file: str) -> bool:
    """Whether a file is neither of the standard library, nor installed, nor made up, as that of code in a text is."""
    return not (file.startswith((_LIBRARY, "<")) or any(part in file for part in _INSTALLED))

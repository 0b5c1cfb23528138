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
    """The same for a traceback that something else has printed, including the errors that led to it."""
    import re  # needed only if something was raised

    found = re.findall(r'^\s*File "(.+?)", line (\d+), in (.+)$', traceback, re.MULTILINE)
    return [(file, int(line), name) for file, line, name in found if not file.startswith(_CALLERS)]


def innermost(places: list[Place]) -> Place | None:
    """The last line of the user's own code; if there is none, the last line of a library."""
    own = [place for place in places if is_own(place[0])] or places
    return own[-1] if own else None


def shown(places: list[Place]) -> list[str]:
    """The frames as Python prints them; if there are very many, the first and the last ones."""
    import linecache  # needed only if something was raised

    def frame(place: Place) -> str:
        file, line, function = place
        source = linecache.getline(file, line).strip()[:_LONGEST_LINE]
        return f'  File "{file}", line {line}, in {function}\n' + (f"    {source}\n" if source else "")

    left_out = len(places) - _FIRST - _LAST
    if left_out <= 0:
        return list(map(frame, places))
    return [*map(frame, places[:_FIRST]), f"  … {left_out} frames …\n", *map(frame, places[-_LAST:])]


def is_own(file: str) -> bool:
    """Whether a file is not in the standard library, not installed, and not a made-up name, as of code in a string."""
    return not (file.startswith((_LIBRARY, "<")) or any(part in file for part in _INSTALLED))

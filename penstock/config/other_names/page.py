"""The tables of docs/coming-from.md; `python -m penstock.config.other_names.page docs/coming-from.md` fills them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.config.models import RunConfig
from penstock.config.other_names.entries import Default
from penstock.config.other_names.tables import DEFAULTS, TABLES
from penstock.config.reading.keys import KeySpec
from penstock.config.sections.base import Section

_PLACE = re.compile(r"(<!-- table: (?P<name>[^>]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The page with every table between `<!-- table: NAME -->` and `<!-- end -->` made anew; the rest stays."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{_table(place['name'])}\n", page)


def places(page: str) -> list[str]:
    """The names of the tables that the page asks for."""
    return [found["name"] for found in _PLACE.finditer(page)]


def _table(name: str) -> str:
    if name in DEFAULTS:
        system = DEFAULTS[name].system
        return _markdown((system, "theirs", "Penstock", "ours"), (_default(entry) for entry in DEFAULTS[name].entries))
    table = TABLES[name]
    return _markdown(
        (table.system, "Penstock", "note"), ((entry.theirs, entry.ours, entry.note) for entry in table.entries)
    )


def _markdown(header: Sequence[str], entries: Iterator[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *entries]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def _default(entry: Default) -> Sequence[str]:
    if not entry.key:
        return entry.theirs, entry.value, "", ""
    ours = _shown(_default_of(entry.key)) + (f": {entry.words}" if entry.words else "")
    return entry.theirs, entry.value, f"`{entry.key}`", ours


def _default_of(key: str) -> Any:
    """The default of a setting, where `kind` is its default too."""
    section: type[Section] = RunConfig
    value: Any = None
    for name in key.split("."):
        field = section.model_fields[name]
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        below = KeySpec.of(field.annotation).sections
        section = next((found for found in below if type(value) is found), below[0]) if below else section
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")

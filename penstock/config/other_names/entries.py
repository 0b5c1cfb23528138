"""An entry of a table: names of another system, and ours for the same thing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_CODE = re.compile(r"`([^`]+)`")
_OF_A_CLASS = re.compile(r"\w+\((\w+)\)|[A-Z]\w+\.(\w+)")


@dataclass(frozen=True)
class Name:
    """A setting of another system, where it has one with the value that the entry is about."""

    path: tuple[str, ...]
    value: str | None = None

    @property
    def dotted(self) -> str:
        """As it is written there."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Entry:
    """A line of the table as the page shows it: names in backticks, ours separated by commas as theirs are.

    As many names of ours as of theirs belong together one by one; otherwise each of theirs is all of ours. A bare word
    behind `name: value` is another value of that name. Where there is no name of ours, `ours` says so in words.

    Worked example: Entry("`epsilon`, `epsilon_high`", "`a.low`, `a.high`") makes `epsilon` `a.low` and `epsilon_high`
    `a.high`; Entry("`mode: x`, `y`", "`a.b`") makes `mode` `a.b`, with the value x or y.
    """

    theirs: str
    ours: str
    note: str = ""
    for_each: bool | tuple[str, ...] = False
    """What an answer about one name of several adds. True: the note, which holds for each. Texts: one for each name.
    False: nothing, as the note is about the names together. An answer about a single name has the note anyway."""

    def notes(self) -> Iterator[str]:
        """What an answer about each name of theirs adds."""
        names = list(self.names())
        if isinstance(self.for_each, tuple):
            yield from self.for_each
        else:
            yield from [self.note if self.for_each or len(names) == 1 else ""] * len(names)

    def pairs(self) -> Iterator[tuple[Name, tuple[str, ...]]]:
        """Each name of theirs with the settings of ours it corresponds to; none where there is no equivalent."""
        theirs, ours = list(self.names()), tuple(_CODE.findall(self.ours))
        one_by_one = len(theirs) == len(ours)
        for place, name in enumerate(theirs):
            yield name, (ours[place],) if one_by_one else ours

    def names(self) -> Iterator[Name]:
        """The names of theirs."""
        before: Name | None = None
        for code in _CODE.findall(self.theirs):
            head, _, value = code.partition(": ")
            if before is not None and before.value is not None and not value and "." not in head:
                yield Name(before.path, head)
                continue
            of_a_class = _OF_A_CLASS.fullmatch(head)
            path = of_a_class[1] or of_a_class[2] if of_a_class else head
            before = Name(tuple(path.split(".")), value or None)
            yield before


@dataclass(frozen=True)
class Table:
    """Entries about one system and one subject."""

    system: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Default:
    """A default of theirs that is not ours; `words` say what ours means where the value does not."""

    theirs: str
    value: str
    key: str = ""
    words: str = ""


@dataclass(frozen=True)
class Defaults:
    """Defaults of one system that differ."""

    system: str
    entries: tuple[Default, ...]

"""What a setting of another system is called here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.config.other_names.entries import Name
from penstock.config.other_names.tables import FOREIGN

_SAYS_NOTHING = frozenset({"enable", "enabled", "interval", "name", "path", "split", "type"})
"""Last parts of names that mean something only behind the others."""
_SHORTEST = 4
"""Letters of a last part that may be known by itself."""


@dataclass(frozen=True)
class _Entry:
    """One name of another system."""

    system: str
    name: Name
    ours: tuple[str, ...]
    words: str
    """What is said where there is nothing of ours."""
    note: str

    def is_about(self, value: Any) -> bool:
        """Whether it says something of the setting with this value."""
        return self.name.value is None or _is_value(value, self.name.value)

    @property
    def answer(self) -> str:
        """`is ... here`, or that it has no equivalent."""
        if not self.ours:
            return f"has {self.words}" if self.words.startswith("no ") else f"needs no setting here: {self.words}"
        kind = "the command " if self.ours[0].startswith("penstock ") else ""
        return f"is {kind}{_listed(self.ours, 'and')} here" + (f" ({self.note})" if self.note else "")


def answer(path: Sequence[str], value: Any) -> str | None:
    """What to say about a setting that Penstock does not have; None where no other system has it either.

    A name is found by as many of its last parts as the tables have: `actor_rollout_ref.actor.clip_ratio_c` as well as
    `loss.clip_ratio_c`. Where systems mean different things by it, all are named.
    """
    found = _found(path)
    fitting = [entry for entry in found if entry.is_about(value)]
    if not fitting:
        return _by_value(found)
    groups: dict[str, list[_Entry]] = {}
    for entry in fitting:
        groups.setdefault(entry.answer, []).append(entry)
    if len(groups) == 1:
        [(said, entries)] = groups.items()
        names = {_shown(entry, value) for entry in entries}
        return f"`{names.pop() if len(names) == 1 else path[-1]}` {said}"
    return "; ".join(f"`{_shown(entries[0], value)}` of {entries[0].system} {said}" for said, entries in groups.items())


def _by_value(found: Sequence[_Entry]) -> str | None:
    """What to say where the tables know the setting only with other values; None where they do not know it."""
    if not found:
        return None
    keys = dict.fromkeys(own.partition(": ")[0] for entry in found for own in entry.ours)
    said = f"is {_listed(keys, 'or')} here, by its value" if keys else "has no equivalent"
    return f"`{found[0].name.dotted}` {said}"


def _found(path: Sequence[str]) -> list[_Entry]:
    """The entries that fit best: the most parts in common, then whole names."""
    ranked = [(_common(entry.name.path, path), entry) for entry in _by_last_part().get(path[-1], ())]
    ranks = {(parts, parts == len(entry.name.path)) for parts, entry in ranked}
    if not ranks:
        return []
    parts, is_whole = max(ranks)
    if parts == 1 and not is_whole and (path[-1] in _SAYS_NOTHING or len(path[-1]) < _SHORTEST):
        return []
    return [entry for common, entry in ranked if common == parts and (parts == len(entry.name.path)) == is_whole]


def _common(name: Sequence[str], path: Sequence[str]) -> int:
    """How many last parts are the same."""
    count = 0
    for one, other in zip(reversed(name), reversed(path), strict=False):
        if one != other:
            break
        count += 1
    return count


def _shown(entry: _Entry, value: Any) -> str:
    own = entry.name.value
    return f"{entry.name.dotted}: {own}" if own is not None and _is_value(value, own) else entry.name.dotted


def _is_value(value: Any, name: str) -> bool:
    return isinstance(value, str | bool) and str(value).lower() == name.lower()


def _listed(names: Iterable[str], last: str) -> str:
    quoted = [f"`{name}`" for name in names]
    return f" {last} ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


@cache
def _by_last_part() -> dict[str, tuple[_Entry, ...]]:
    index: dict[str, tuple[_Entry, ...]] = {}
    for entry in _entries():
        last = entry.name.path[-1]
        index[last] = (*index.get(last, ()), entry)
    return index


def _entries() -> Iterator[_Entry]:
    for table in FOREIGN.values():
        for row in table.entries:
            for (name, ours), note in zip(row.pairs(), row.notes(), strict=True):
                yield _Entry(table.system, name, ours, row.ours, note)

"""All tables, by the name under which docs/coming-from.md asks for them."""

from __future__ import annotations

from penstock.config.other_names import nemo_rl, trl, verl
from penstock.config.other_names.common import COMMON
from penstock.config.other_names.entries import Defaults, Entry, Table
from penstock.config.other_names.ours import BEFORE, RENAMED_VALUES
from penstock.config.other_names.prime_rl import AREAL, PRIME_RL

_PARTS = ("model", "generation", "algorithm", "staleness", "records")


def _renamed() -> Table:
    """What was called otherwise in Penstock itself, as entries."""
    entries = [Entry(f"`{old}`", f"`{now}`", _values(now)) for old, now in BEFORE.items()]
    return Table("before", tuple(entries))


def _values(key: str) -> str:
    return ", ".join(f"`{old}` is `{now}`" for old, now in RENAMED_VALUES.get(key, {}).items())


FOREIGN: dict[str, Table] = {
    **{
        f"{name} {part}": getattr(system, part.upper())
        for name, system in (("trl", trl), ("verl", verl), ("nemo-rl", nemo_rl))
        for part in _PARTS
    },
    "prime-rl": PRIME_RL,
    "areal": AREAL,
    "elsewhere": COMMON,
}
"""Names of other systems."""

TABLES: dict[str, Table] = {**FOREIGN, "before": _renamed()}
"""Everything that is mapped to a setting."""

DEFAULTS: dict[str, Defaults] = {
    "trl defaults": trl.DEFAULTS,
    "verl defaults": verl.DEFAULTS,
    "nemo-rl defaults": nemo_rl.DEFAULTS,
}
"""Defaults that differ."""

"""Numbers for people: round ticks on an axis, and values as short as is readable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TINIEST = 1e-150
"""Values closer to zero count as zero on an axis."""


@dataclass(frozen=True)
class Axis:
    """A range with round ends, and the ticks in it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """The position of a value, from 0 at the low end to 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def value_axis(values: Iterable[float], *, count: int = 4, floor: float | None = None) -> Axis:
    """An axis that holds all values, with round ends; `floor` is a value that is always on it."""
    found = [value for value in values if math.isfinite(value)]
    if floor is not None:
        found.append(floor)
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-12):
        room = abs(high) * 0.5 if abs(high) > _TINIEST else 0.5
        low, high = (low - room, high + room) if floor is None or low > floor else (low, high + room)
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(_clean(step * k, step) for k in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def step_axis(first: float, last: float, *, count: int = 5) -> Axis:
    """An axis of whole steps that ends where the data does; ticks are round."""
    if last <= first:
        return Axis(first - 0.5, first + 0.5, (first,))
    ticks = tuple(tick for tick in ticks_within(first, last, count) if tick.is_integer())
    return Axis(first, last, ticks or (first, last))


def ticks_within(first: float, last: float, count: int) -> list[float]:
    """About `count` round values from `first` to `last`."""
    return [float(tick) for tick in value_axis([first, last], count=count).ticks if first <= tick <= last]


def _round_step(rough: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(step * magnitude for step in _STEPS if step * magnitude >= rough * (1 - 1e-9))


def _clean(value: float, step: float) -> float:
    digits = max(0, 2 - math.floor(math.log10(step)))
    return round(value, digits) + 0.0


def short(value: float | None, digits: int = 3) -> str:
    """A value with `digits` significant digits: `0.0123`, `1.5`, `12.3k`, `4.56M`, `1.2e-5`; `–` for none."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if unit != 'k' else 1e3):.{digits}g}{unit}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def alike(values: Sequence[float]) -> list[str]:
    """Values that are compared, all with as many decimals as the largest needs for three significant digits."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not 1e-3 <= largest < 1e4 or not all(map(math.isfinite, values)):
        return [short(value) for value in values]
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    return [f"{value:,.{decimals}f}" for value in values]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks of an axis, all with as many decimals as the finest of them needs."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest >= 1e5 or 0 < largest < 1e-3:
        return [short(tick) for tick in ticks]
    decimals = max((_decimals(tick) for tick in ticks), default=0)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _decimals(value: float) -> int:
    form = f"{value:.6f}".rstrip("0")
    return len(form) - form.index(".") - 1


def percent(value: float | None) -> str:
    """A share as `84 %`; `–` for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if 0 < abs(value) < 0.0995 else f"{100 * value:.0f} %"


def seconds(value: float | None) -> str:
    """A time as `340 ms`, `1.25 s`, `2 min 05 s`, `3 h 20 min`; `–` for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    if abs(value) < 100:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def byte_size(value: float | None) -> str:
    """A number of bytes as `812 B`, `3.2 kB`, `1.25 GB`, in powers of 1,000; `–` for none."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def counted(count: int, what: str) -> str:
    """`1 group`, `2,500 groups`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"

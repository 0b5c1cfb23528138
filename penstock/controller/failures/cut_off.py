"""Reports when gradients are clipped or masked away: otherwise a run would continue and learn nothing."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.algorithms.cut_off import CUT_OFFS, MOSTLY
from penstock.observe.events import EventLog

_STEPS = 3


class CutOffWatch:
    """Emits `gradients_cut` when more than nine tenths of a kind of token lost their gradient in three steps in a row.

    Invariant: a cause is reported once, and again only after a step in which it did not hold.

    Worked example: masked shares of 0.95, 0.97, 0.2, 0.96, 0.96, 0.96, 0.96 in steps 1 to 7 emit one event, in step 6.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._in_a_row = dict.fromkeys(CUT_OFFS, 0)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step's metrics, by their names in `metrics.jsonl`."""
        for cause in CUT_OFFS:
            share = cause.share(metrics, "train/")
            self._in_a_row[cause] = self._in_a_row[cause] + 1 if share is not None and share > MOSTLY else 0
            if self._in_a_row[cause] == _STEPS and share is not None:
                what = f"{share:.0%} {cause.what}, {_STEPS} steps in a row"
                self._events.emit("gradients_cut", step=step, what=what, advice=cause.advice)

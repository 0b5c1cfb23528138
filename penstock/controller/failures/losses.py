"""What a run cannot go on without: which part an error says is gone, if it says so."""

from __future__ import annotations

from penstock.controller.failures.classify import causes
from penstock.errors import DataPlaneLost, TrainerLost

_PARTS: dict[type[BaseException], str] = {TrainerLost: "trainer", DataPlaneLost: "data plane"}


def lost_part(error: BaseException) -> str | None:
    """`trainer` or `data plane`, if the error or anything that led to it is the loss of one; None if not.

    The type decides, never a message. No attempt with the same parts can succeed after a loss: only the last checkpoint
    is left.
    """
    links = list(causes(error))
    return next((part for kind, part in _PARTS.items() if any(isinstance(link, kind) for link in links)), None)

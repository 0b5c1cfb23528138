"""What a run cannot go on without: which part an error says is gone, if it says so."""

from __future__ import annotations

from typing import NamedTuple

from penstock.controller.failures.classify import causes
from penstock.errors import DataPlaneLost, TrainerLost

_PARTS: dict[type[BaseException], str] = {TrainerLost: "trainer", DataPlaneLost: "data plane"}


class Loss(NamedTuple):
    """A part of a run that is gone, with what was in it."""

    part: str
    """`trainer` or `data plane`."""
    cause: BaseException
    """The error that says so."""


def loss_in(error: BaseException) -> Loss | None:
    """The first loss among an error and what led to it; None if there is none.

    The type of an error decides, never its message. No attempt with the same parts can succeed after a loss: only the
    last checkpoint is left.
    """
    for link in causes(error):
        for kind, part in _PARTS.items():
            if isinstance(link, kind):
                return Loss(part, link)
    return None

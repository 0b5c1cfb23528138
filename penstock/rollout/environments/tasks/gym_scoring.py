"""Scoring by reasoning-gym, as a plain function of texts and numbers: it is called in its own process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from penstock.rollout.environments.rewards.plain_data import decode, encode


def score_entry(task: str, args: Mapping[str, Any], entry: dict[str, Any], response: str) -> float:
    """The reward that a task, with its settings, gives a response to one of its entries."""
    scorer = _scorer(task, encode(args))
    return scorer.score_answer(answer=response.strip(), entry=entry)  # type: ignore[no-any-return]


def load() -> None:
    """Import the package, so that no response pays for it."""
    import reasoning_gym  # noqa: F401


@functools.lru_cache(maxsize=8)
def _scorer(task: str, args: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0, **decode(args))

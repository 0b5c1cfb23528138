"""Environments: where prompts come from and how responses get their reward.

An environment drives a generation handle and returns a trajectory. It never sees engines, tensors or other samples. Use
the names below to write your own environments (docs/environments.md). They are imported on first use, so that the
processes that compute rewards start without all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.rollout.environments.base import Environment, GenerationHandle, Segment, Split, Trajectory
    from penstock.rollout.environments.custom import PromptData
    from penstock.rollout.environments.extra_columns import ExtraColumn
    from penstock.rollout.environments.turns.multi_turn import Done, MultiTurnEnvironment, Observation, Turn
    from penstock.rollout.environments.turns.single_turn import RewardCall, SingleTurnEnvironment
    from penstock.rollout.prompts import Prompt

__all__ = [
    "Done",
    "Environment",
    "ExtraColumn",
    "GenerationHandle",
    "MultiTurnEnvironment",
    "Observation",
    "Prompt",
    "PromptData",
    "RewardCall",
    "Segment",
    "SingleTurnEnvironment",
    "Split",
    "Trajectory",
    "Turn",
]

_HERE = "penstock.rollout.environments"
_HOMES = {
    **dict.fromkeys(("Environment", "GenerationHandle", "Segment", "Split", "Trajectory"), f"{_HERE}.base"),
    **dict.fromkeys(("Done", "MultiTurnEnvironment", "Observation", "Turn"), f"{_HERE}.turns.multi_turn"),
    "ExtraColumn": f"{_HERE}.extra_columns",
    "Prompt": "penstock.rollout.prompts",
    "PromptData": f"{_HERE}.custom",
    **dict.fromkeys(("RewardCall", "SingleTurnEnvironment"), f"{_HERE}.turns.single_turn"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""Rules between the environment and the prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.models import RunConfig


def environment_rules(config: RunConfig) -> Iterator[str]:
    """Settings that the environment needs and does not have, or that name nothing."""
    environment = config.rollout.environment
    if environment.kind == "function":
        if environment.function is None:
            yield "rollout.environment.function: is needed with kind = function, for example my_rewards:exact_match"
        elif environment.function.count(":") != 1 or not all(environment.function.split(":")):
            yield f"rollout.environment.function: {environment.function!r} is not module:callable"
        if config.data.train_path is None:
            yield "data.train_path: is needed with rollout.environment.kind = function"


def idle_environment_settings(config: RunConfig) -> dict[str, str]:
    """Settings that the chosen environment does not read, with the reason."""
    idle: dict[str, str] = {}
    environment = config.rollout.environment.kind
    if environment != "function":
        idle["rollout.environment.function"] = f"has no effect with kind = {environment}; remove it"
        for name in ("train_path", "eval_path", "prompt_key", "answer_key"):
            idle[f"data.{name}"] = f"has no effect with {environment}, which makes its own prompts; remove it"
    return idle

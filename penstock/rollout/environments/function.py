"""`function`: a reward function of the user's over a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.imports import import_callable
from penstock.rollout.environments.reward_pool import RewardPool
from penstock.rollout.environments.single_turn import SingleTurnEnvironment
from penstock.rollout.prompts import Prompt


class FunctionEnvironment(SingleTurnEnvironment):
    """Calls `function(prompt=…, response=…, answer=…, **args)` for each response."""

    def __init__(
        self,
        path: str,
        args: Mapping[str, Any],
        pool: RewardPool,
        *,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> None:
        super().__init__(pool)
        self._path = path
        self._function = import_callable(path, "rollout.environment.function", "function")
        self._args = dict(args)
        _check_signature(path, self._function, self._args)
        self._prompts = {Split.TRAIN: train, Split.EVAL: held_out}

    @property
    def name(self) -> str:
        return f"function:{self._path}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    def score(self, prompt: Prompt, response: str) -> object:
        return self._function(prompt=prompt.text, response=response, answer=prompt.answer, **self._args)


def _check_signature(path: str, function: Callable[..., object], args: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(prompt="", response="", answer=None, **args)
    except (TypeError, ValueError) as error:  # ValueError: a function of C, which does not say what it takes
        raise ConfigError(
            [
                f"rollout.environment.function: {path} cannot be called as function(prompt=…, response=…, answer=…"
                f"{''.join(f', {name}=…' for name in args)}): {error}"
            ]
        ) from error

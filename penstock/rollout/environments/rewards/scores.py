"""A score: the reward as a number, and its named components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import EnvironmentFailure, WrongReward
from penstock.rollout.environments.base import checked_reward
from penstock.rollout.prompts import Prompt
from penstock.text import cut, safe

Aggregation = Literal["mean", "sum", "max"]
"""How the numbers of several samples become one."""
_REWARD = "reward"
_MOST, _LONGEST = 64, 100
"""Limits on the components of one reward, and on the characters of a component's name."""


@dataclass(frozen=True)
class Score:
    """A reward and its components."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


def checked_score(value: object, prompt: Prompt) -> Score:
    """The score from a number, or from a mapping with `reward` and named components; else a failure that says why."""
    if not isinstance(value, Mapping):
        return Score(checked_reward(value, prompt))
    if _REWARD not in value:
        has = f"it has {cut(', '.join(map(str, value)), 200)}" if value else "it is empty"
        raise WrongReward(
            f"the reward of prompt {prompt.prompt_id} is a mapping without the key 'reward' ({has}); return a number, "
            "or {'reward': number, 'name of a component': number}",
            "returned a mapping without the key 'reward'",
        )
    reward = checked_reward(value[_REWARD], prompt)
    rest = {name: number for name, number in value.items() if name != _REWARD}
    return Score(reward, checked_numbers(rest, prompt, "component"))


def checked_numbers(numbers: object, prompt: Prompt, what: str) -> dict[str, float]:
    """Named finite numbers; `what` is what one of them is called."""
    if not isinstance(numbers, Mapping):
        raise WrongReward(
            f"the {what}s of prompt {prompt.prompt_id} are {_shown(numbers)}, not a mapping of numbers",
            f"its {what}s are not a mapping",
        )
    if len(numbers) > _MOST:
        raise WrongReward(
            f"prompt {prompt.prompt_id} has {len(numbers)} {what}s; at most {_MOST} are allowed", f"too many {what}s"
        )
    return {_checked_name(name, prompt, what): _checked(name, each, prompt, what) for name, each in numbers.items()}


def weighted_score(parts: Sequence[tuple[str, float, Score]], prompt: Prompt) -> Score:
    """The weighted sum of several functions' rewards; parts are name, weight and score.

    Each function's own reward, without its weight, is the component of its name; its own components follow it.

    Example: `("exact", 2.0, Score(1.0))` and `("form", 0.5, Score(0.4, {"tags": 1.0}))` make the reward 2.2 with the
    components `exact` 1.0, `form` 0.4 and `form/tags` 1.0.
    """
    components: dict[str, float] = {}
    for name, _, score in parts:
        components[name] = score.reward
        components |= {f"{name}/{own}": number for own, number in score.components.items()}
    return Score(checked_reward(sum(weight * score.reward for _, weight, score in parts), prompt), components)


def combined_by_name(
    numbers: Iterable[Mapping[str, float]], how: Mapping[str, Aggregation] | None = None
) -> dict[str, float]:
    """One number for each name, over those that have it: their mean, or what `how` says for the name."""
    found: dict[str, list[float]] = {}
    for each in numbers:
        for name, number in each.items():
            found.setdefault(name, []).append(number)
    return {name: _combined(values, (how or {}).get(name, "mean")) for name, values in found.items()}


def _combined(values: Sequence[float], how: Aggregation) -> float:
    if how == "max":
        return max(values)
    return sum(values) / len(values) if how == "mean" else sum(values)


@contextmanager
def failures_about(response: str | None, sample: int | None = None) -> Iterator[None]:
    """Failures inside are about this response, or this sample of its group, unless they know better."""
    try:
        yield
    except EnvironmentFailure as failure:
        failure.response = response if failure.response is None else failure.response
        failure.sample = sample if failure.sample is None else failure.sample
        raise


@contextmanager
def failures_of(function: str) -> Iterator[None]:
    """Failures inside are of this reward function; their messages name it."""
    try:
        yield
    except EnvironmentFailure as failure:
        if failure.function is None:
            failure.function = function
            if function not in str(failure):
                failure.args = (f"reward function {function}: {failure}",)
        raise


def _checked_name(name: object, prompt: Prompt, what: str) -> str:
    if isinstance(name, str) and 0 < len(name) <= _LONGEST:
        return safe(name)
    raise WrongReward(
        f"a {what} of prompt {prompt.prompt_id} has the name {_shown(name)}; names are texts of 1 to {_LONGEST} "
        "characters",
        f"a {what} has a name that is not a text of 1 to {_LONGEST} characters",
    )


def _checked(name: object, value: object, prompt: Prompt, what: str) -> float:
    try:
        return checked_reward(value, prompt)
    except WrongReward:
        raise WrongReward(
            f"the {what} {name!r} of prompt {prompt.prompt_id} is {_shown(value)}, not a finite number",
            f"the {what} {name!r} is not a finite number",
        ) from None


def _shown(value: Any) -> str:
    return cut(safe(repr(value)), 200)

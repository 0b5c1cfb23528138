"""`custom`: a user's environment class, constructed and checked at setup."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.imports import import_callable
from penstock.rollout.environments.base import Environment, Split
from penstock.rollout.environments.extra_columns import declared_columns
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.turns.multi_turn import check_turn_ends
from penstock.rollout.prompts import Prompt
from penstock.text import named_error

_KEY = "rollout.environment.import_path"
_OFFERED = ("data", "seed", "pool")
"""What a constructor gets if it has a parameter of that name."""


@dataclass(frozen=True)
class PromptData:
    """What the configuration's `data` section gives an environment."""

    train: Sequence[Prompt]
    """Prompts of `data.train_path`; empty without one."""
    held_out: Sequence[Prompt]
    """Prompts of `data.eval_path`; empty without one."""
    train_size: int
    """How many training prompts to make, for an environment that makes its own."""
    eval_size: int
    """How many held-out prompts to make, for an environment that makes its own."""


def make_custom(
    path: str, args: Mapping[str, Any], data: PromptData, pool: RewardPool, seed: int, settings: Sequence[str] = ()
) -> Environment:
    """Construct `module:Class` with `args` and with those of `data`, `seed` and `pool` that it asks for.

    `settings` are the keys behind `data`: they have no effect, and are refused, if the class does not ask for `data`.
    """
    made = import_callable(path, _KEY, "class")
    offered = {"data": data, "seed": seed, "pool": pool}
    try:
        parameters = inspect.signature(made).parameters
        wanted = {name: offered[name] for name in _OFFERED if name in parameters and name not in args}
        inspect.signature(made).bind(**args, **wanted)
    except (TypeError, ValueError) as error:
        _refuse_another_class(made, path)
        given = ", ".join(args) or "nothing"
        raise ConfigError(
            [f"{_KEY}: {path} cannot be constructed with rollout.environment.args ({given}): {error}"]
        ) from error
    if "data" not in wanted and settings:
        _refuse_another_class(made, path)
        reason = f"has no effect, because {path} takes no parameter named data; remove it"
        raise ConfigError([f"{key}: {reason}" for key in settings])
    try:
        environment = made(**args, **wanted)
    except ConfigError:
        raise
    except BaseException as error:  # a user's constructor may raise anything, `sys.exit()` included
        raise ConfigError([f"{_KEY}: {path} cannot be constructed: {named_error(error)}"]) from error
    _check(environment, path)
    return environment  # type: ignore[no-any-return]


def _refuse_another_class(made: Any, path: str) -> None:
    """Refuse a class without the methods of an environment, before any other problem with constructing it."""
    wrong = _missing(made) if isinstance(made, type) else []
    if wrong:
        raise ConfigError([f"{_KEY}: {path} is not an environment: it {'; it '.join(wrong)}"])


def _missing(environment: Any) -> list[str]:
    return [f"has no method {name}" for name in ("prompts", "run", "close") if not callable(_get(environment, name))]


def _check(environment: Any, path: str) -> None:
    """Refuse what is not an `Environment`, with what it lacks."""
    wrong = _missing(environment)
    if not isinstance(_get(environment, "name"), str):
        wrong.append("has no name, or one that is not text")
    for name in ("run", "close"):
        method = _get(environment, name)
        if callable(method) and not inspect.iscoroutinefunction(method):
            wrong.append(f"has a {name} that is not async")
    if wrong:
        raise ConfigError([f"{_KEY}: {path} is not an environment: it {'; it '.join(wrong)}"])
    try:
        check_turn_ends(_get(environment, "turn_ends"))
    except TypeError as error:
        raise ConfigError([f"{_KEY}: {path}: {error}"]) from error
    _check_columns(environment, path)
    _check_prompts(environment, path)


def _check_columns(environment: Any, path: str) -> None:
    try:
        declared_columns(environment)
    except ConfigError as error:
        raise ConfigError([f"{_KEY}: {path}.{problem}" for problem in error.problems]) from error
    except BaseException as error:  # a user's property may raise anything, `sys.exit()` included
        raise ConfigError([f"{_KEY}: {path}.extra_columns raised {named_error(error)}"]) from error


def _check_prompts(environment: Any, path: str) -> None:
    for split in Split:
        try:
            prompts = environment.prompts(split)
            given: list[Any] = list(prompts) if isinstance(prompts, Sequence) else [None]
        except BaseException as error:  # a user's method may raise anything, `sys.exit()` included
            raise ConfigError([f"{_KEY}: {path}.prompts({split}) raised {named_error(error)}"]) from error
        if not all(isinstance(prompt, Prompt) for prompt in given):
            raise ConfigError([f"{_KEY}: {path}.prompts({split}) must give a list of Prompt objects"])
        if not all(isinstance(text, str) for prompt in given for text in (prompt.prompt_id, prompt.text)):
            raise ConfigError([f"{_KEY}: {path}.prompts({split}) gives a Prompt whose prompt_id or text is not text"])
        ids = [prompt.prompt_id for prompt in given]
        if len(set(ids)) != len(ids):
            raise ConfigError([f"{_KEY}: {path}.prompts({split}) gives two prompts with the same prompt_id"])


def _get(environment: Any, name: str) -> Any:
    return getattr(environment, name, None)

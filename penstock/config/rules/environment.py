"""Rules between the environment and the prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.config.reading.environment_args import wrong_args
from penstock.config.reading.values import component_name

if TYPE_CHECKING:
    from penstock.config.models import RunConfig
    from penstock.config.sections.rollout import EnvironmentConfig, RewardFunctionConfig

_NEEDS_DATA = ("function", "math")
_TAKES_DATA = (*_NEEDS_DATA, "custom")
_IMPORTED = {"function": ("callable", "my_rewards:exact_match"), "custom": ("Class", "my_environments:GuessingGame")}
"""Environments of the user's own: what `import_path` names, and an example of it."""
_NO_POOL = ("calculator", "verifiers")
"""Environments without a reward function that could run elsewhere."""
_OF_FILES = ("train_path", "eval_path", "prompt_key", "answer_key", "format")
_OF_DATASETS = ("subset", "download")
_COMPONENT = re.compile(r"[\w.-]{1,100}")
"""What the name of a reward among several looks like."""


def environment_rules(config: RunConfig) -> Iterator[str]:
    """Settings that the environment needs and does not have, or that name nothing."""
    environment = config.rollout.environment
    kind = environment.kind
    if kind == "function" and environment.rewards is not None:
        yield from _rewards(environment, environment.rewards)
    elif kind in _IMPORTED:
        yield from _names(environment, *_IMPORTED[kind])
    if kind in _NEEDS_DATA and config.data.train_path is None:
        yield f"data.train_path: is needed with rollout.environment.kind = {kind}"
    if kind.startswith("verifiers:") and not config.data.chat_template:
        yield f"data.chat_template: must be true with rollout.environment.kind = {kind}, whose prompts are chats"
    yield from wrong_args(kind, environment.args)


def _rewards(environment: EnvironmentConfig, rewards: Sequence[RewardFunctionConfig]) -> Iterator[str]:
    """Rules of several functions: each is named as code is, and has a name of its own."""
    if environment.args:
        yield (
            "rollout.environment.args: has no effect together with rollout.environment.rewards, which have their own "
            "args"
        )
    where: dict[str, int] = {}
    for place, reward in enumerate(rewards):
        key, name = f"rollout.environment.rewards[{place}]", component_name(reward.name, reward.import_path)
        if not _is_import_path(reward.import_path):
            yield f"{key}.import_path: {reward.import_path!r} is not module:callable"
        elif not _COMPONENT.fullmatch(name):
            yield f"{key}.name: {name!r} cannot be part of a metric's name; use letters, digits, _, - and ."
        elif name in where:
            other = f"rollout.environment.rewards[{where[name]}]"
            yield f"{key}.name: {name!r} is also the name of {other}; rename one of them"
        where.setdefault(name, place)
    if not any(reward.weight for reward in rewards):
        yield (
            "rollout.environment.rewards: every weight is 0, so every reward would be 0 and nothing would be learned; "
            "give at least one function another weight"
        )


def _is_import_path(value: str) -> bool:
    return value.count(":") == 1 and all(value.split(":"))


def _names(environment: EnvironmentConfig, what: str, example: str) -> Iterator[str]:
    value = environment.import_path
    if value is None:
        yield f"rollout.environment.import_path: is needed with kind = {environment.kind}, for example {example}"
    elif not _is_import_path(value):
        yield f"rollout.environment.import_path: {value!r} is not module:{what}"


def idle_environment_settings(config: RunConfig) -> dict[str, str]:
    """Settings that the chosen environment does not read, with the reason."""
    kind = config.rollout.environment.kind
    idle = {}
    if kind not in _IMPORTED:
        reason = f"has no effect with kind = {kind}; it belongs to kind = {' and '.join(_IMPORTED)}"
        idle["rollout.environment.import_path"] = reason
    if kind != "function":
        idle["rollout.environment.rewards"] = f"has no effect with kind = {kind}; it belongs to kind = function"
    elif config.rollout.environment.rewards is not None:
        reason = "has no effect together with rollout.environment.rewards; make it one of them"
        idle["rollout.environment.import_path"] = reason
    if not config.data.chat_template:
        idle["data.chat_template_kwargs"] = "has no effect without data.chat_template = true; set that, or remove this"
    if kind.partition(":")[0] in _NO_POOL:
        idle["rollout.environment.in_process"] = (
            f"has no effect with {kind}, which always runs in the run's own process"
        )
    if kind.partition(":")[0] not in _TAKES_DATA:
        reason = f"has no effect with {kind}, which generates its own prompts; remove it"
        return idle | {f"data.{name}": reason for name in (*_OF_FILES, *_OF_DATASETS, "train_split", "eval_split")}
    return idle | _idle_data_settings(config)


def _idle_data_settings(config: RunConfig) -> dict[str, str]:
    """Of an environment that reads prompts: settings of other forms of data than it is given."""
    data = config.data
    formats = {path: data.format_of(path) for path in (data.train_path, data.eval_path) if path is not None}
    idle: dict[str, str] = {}
    if not formats:
        idle |= {f"data.{name}": "has no effect without data.train_path; remove it" for name in _OF_FILES[2:]}
    if "datasets" not in formats.values():
        reason = "has no effect: it belongs to data.format = datasets, and no path is read that way; remove it"
        idle |= {f"data.{name}": reason for name in _OF_DATASETS}
    for name, path in (("train", data.train_path), ("eval", data.eval_path)):
        if path is None:
            idle[f"data.{name}_split"] = f"has no effect without data.{name}_path; remove it"
        elif formats[path] != "datasets":
            idle[f"data.{name}_split"] = f"has no effect: data.{name}_path is read as {formats[path]}; remove it"
    if data.eval_path is None and config.rollout.environment.kind in _NEEDS_DATA:
        idle["data.eval_size"] = "has no effect without data.eval_path; remove it"
    return idle

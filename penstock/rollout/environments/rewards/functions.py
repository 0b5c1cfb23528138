"""Reward functions as the settings name them, imported, looked at, and ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.rollout.environments.rewards.plain_data import NotPlain, encode
from penstock.rollout.environments.rewards.pool import FunctionName, RewardPool, is_importable
from penstock.rollout.environments.rewards.signature import Signature, Supply, problems_of, signature_of, wanted_names
from penstock.rollout.environments.rewards.worker import KEY, import_function
from penstock.rollout.prompts import Prompt

Inputs = Mapping[str, Any]
"""What is known about one response, by the names in `reward_signature.GIVEN`."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward function as the settings name it."""

    path: str
    """`module:callable`."""
    args: Mapping[str, Any]
    key: str = KEY
    """The setting that names it."""
    args_key: str = "rollout.environment.args"
    component: str | None = None
    """What its reward is called among several; None if it is the only one."""
    weight: float = 1.0
    batched: bool = False
    """Whether it gets a whole group at once."""


@dataclass(frozen=True)
class RewardFunction:
    """A function that can be called with the available inputs."""

    spec: RewardSpec
    function: Callable[..., object] | FunctionName
    """By its name if it runs in a process."""
    signature: Signature

    def asks_for(self, name: str) -> bool:
        """Whether it gets the input with this name."""
        return self.signature.takes_all or name in self.signature.names

    def inputs(self, prompt: Prompt, responses: Sequence[Inputs]) -> dict[str, Any]:
        """The keywords of a call for the first of the responses."""
        known = {**prompt.columns, **responses[0]}
        return {name: known[name] for name in self._wanted(prompt)} | dict(self.spec.args)

    def group_inputs(self, prompt: Prompt, responses: Sequence[Inputs]) -> dict[str, Any]:
        """The keywords of a call for all: a list for everything but `args`."""
        known = [{**prompt.columns, **each} for each in responses]
        return {name: [each[name] for each in known] for name in self._wanted(prompt)} | dict(self.spec.args)

    def _wanted(self, prompt: Prompt) -> tuple[str, ...]:
        return wanted_names(self.signature, self.spec.args, prompt.columns)


def load_functions(specs: Sequence[RewardSpec], pool: RewardPool, prompts: Sequence[Prompt]) -> list[RewardFunction]:
    """All functions, each found where it will run; `ConfigError` if one cannot be called with the available inputs."""
    anywhere = not pool.in_process
    try:
        loaded = [_loaded(spec, pool, prompts, anywhere=anywhere) for spec in specs]
        problems = [line for function in loaded for line in _problems(function, prompts)]
        if problems:
            raise ConfigError(problems)
    except BaseException:
        pool.kill()
        raise
    return loaded


def find_functions(specs: Sequence[RewardSpec], pool: RewardPool) -> None:
    """Raise `ConfigError` if a function is not found where it will run, regardless of the data; ends the pool's
    processes."""
    try:
        for spec in specs:
            _loaded(spec, pool, (), anywhere=not pool.in_process)
    finally:
        pool.kill()


def _loaded(spec: RewardSpec, pool: RewardPool, prompts: Sequence[Prompt], *, anywhere: bool) -> RewardFunction:
    """By its name if it can run in a process, else imported here, and the run says why."""
    if anywhere:
        reason = "its module cannot be imported by another process"
        if is_importable(spec.path.partition(":")[0]):
            named = RewardFunction(spec, FunctionName(spec.path), pool.check(FunctionName(spec.path), spec.key))
            reason = _why_not_plain(named, prompts)
            if not reason:
                return named
        pool.stay_in_process(spec.path, reason)
    function = import_function(spec.path, spec.key)
    return RewardFunction(spec, function, signature_of(function))


def _why_not_plain(function: RewardFunction, prompts: Sequence[Prompt]) -> str:
    """Which of its arguments cannot be sent to another process; empty if all can."""
    try:
        encode(function.spec.args)
    except NotPlain as error:
        return f"{function.spec.args_key} cannot be sent to another process: {error}"
    for prompt in prompts:
        if function.asks_for("answer") and (why := _not_plain(prompt.answer)):
            return f"the answer of prompt {prompt.prompt_id} (data.answer_key) cannot be sent to another process: {why}"
        for name in wanted_names(function.signature, function.spec.args, prompt.columns):
            if name in prompt.columns and (why := _not_plain(prompt.columns[name])):
                return f"column {name} of prompt {prompt.prompt_id} cannot be sent to another process: {why}"
    return ""


def _not_plain(value: object) -> str | None:
    try:
        encode(value)
    except NotPlain as error:
        return str(error)
    return None


def _problems(function: RewardFunction, prompts: Sequence[Prompt]) -> list[str]:
    spec = function.spec
    return problems_of(spec.path, spec.key, function.signature, _supply(spec, prompts))


def _supply(spec: RewardSpec, prompts: Sequence[Prompt]) -> Supply:
    """What the settings and the records of all prompts have for a function; columns in the order of the first."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    lacking: dict[str, str] = {}
    for prompt in prompts:
        for name in names:
            if name not in prompt.columns:
                lacking.setdefault(name, prompt.prompt_id)
    return Supply(spec.args, spec.args_key, [name for name in names if name not in lacking], lacking)

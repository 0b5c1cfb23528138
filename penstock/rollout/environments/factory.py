"""From settings to an environment."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from penstock.config.reading.environment_args import CalculatorArgs, MathArgs
from penstock.config.reading.values import component_name
from penstock.config.sections.data import PROCEDURAL_TRAIN_SIZE, DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import ConfigError
from penstock.rollout.datasets import read_prompts
from penstock.rollout.environments.base import Environment
from penstock.rollout.environments.custom import PromptData, make_custom
from penstock.rollout.environments.limits import LimitedEnvironment, TurnLimits
from penstock.rollout.environments.rewards.function import FunctionEnvironment, GroupFunctionEnvironment
from penstock.rollout.environments.rewards.functions import RewardSpec, find_functions
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.rewards.reward_log import RewardLog
from penstock.rollout.environments.tasks import gym_scoring, math_grading
from penstock.rollout.environments.tasks.calculator import CalculatorEnvironment
from penstock.rollout.environments.tasks.math import MathEnvironment
from penstock.rollout.environments.tasks.reasoning_gym import ReasoningGymEnvironment


def make_environment(
    config: EnvironmentConfig,
    data: DataConfig,
    *,
    seed: int,
    at_most: int | None = None,
    log: RewardLog | None = None,
) -> Environment:
    """The environment that `rollout.environment` describes, with the prompts of `data`, at most `at_most` of each part.

    Rewards are computed in a bounded pool with a time limit; environments that take turns are bounded and timed as a
    whole. `log` receives what rewards print, and which of them stay in this process.
    """
    settings = _settings_of_prompts(data)
    if at_most is not None:
        data = first_records(data, at_most)
    kind, _, name = config.kind.partition(":")
    if kind == "function":
        return _function(config, data, _pool(config, log))
    if kind == "math":
        _require("math_verify", "math-verify>=0.8", "math", config)
        args, pool = MathArgs.model_validate(config.args), _pool(config, log, math_grading.load)
        return MathEnvironment(args, pool, train=read_prompts(data, "train"), held_out=read_prompts(data, "eval"))
    sizes = {"train_size": data.train_size or PROCEDURAL_TRAIN_SIZE, "eval_size": data.eval_size}
    if kind == "reasoning_gym":
        _require("reasoning_gym", "reasoning-gym>=0.1.25", "reasoning-gym", config)
        pool = _pool(config, log, gym_scoring.load)
        return ReasoningGymEnvironment(name, config.args, pool, seed=seed, **sizes)
    limits = TurnLimits(config.workers, config.timeout_seconds)
    if kind == "verifiers":
        return _verifiers(name, config, data, limits)
    if kind == "calculator":
        calculator = CalculatorEnvironment(CalculatorArgs.model_validate(config.args), seed=seed, **sizes)
        return LimitedEnvironment(calculator, limits)
    assert config.import_path is not None
    given = PromptData(train=read_prompts(data, "train"), held_out=read_prompts(data, "eval"), **sizes)
    pool = _pool(config, log)
    return LimitedEnvironment(make_custom(config.import_path, config.args, given, pool, seed, settings), limits, pool)


def first_records(data: DataConfig, at_most: int) -> DataConfig:
    """The same data, with at most `at_most` prompts of each part."""
    sizes = {"train_size": min(data.train_size or at_most, at_most), "eval_size": min(data.eval_size, at_most)}
    return data.model_copy(update=sizes)


def check_functions(config: EnvironmentConfig) -> None:
    """Raise `ConfigError` if a function of a `function` environment cannot be found where it will run."""
    find_functions(_reward_specs(config), _pool(config, None))


def _settings_of_prompts(data: DataConfig) -> list[str]:
    """Keys that say which prompts, and how many, if they differ from the defaults."""
    return [
        f"data.{name}"
        for name in ("train_path", "eval_path", "train_size", "eval_size")
        if getattr(data, name) != DataConfig.model_fields[name].default
    ]


def _pool(config: EnvironmentConfig, log: RewardLog | None, warm_up: Callable[[], object] | None = None) -> RewardPool:
    return RewardPool(config.workers, config.timeout_seconds, in_process=config.in_process, warm_up=warm_up, log=log)


def _function(config: EnvironmentConfig, data: DataConfig, pool: RewardPool) -> Environment:
    made = GroupFunctionEnvironment if any(reward.batched for reward in config.rewards or ()) else FunctionEnvironment
    train, held_out = read_prompts(data, "train"), read_prompts(data, "eval")
    return made(_reward_specs(config), pool, train=train, held_out=held_out)


def _reward_specs(config: EnvironmentConfig) -> list[RewardSpec]:
    if config.rewards is None:
        assert config.import_path is not None
        return [RewardSpec(config.import_path, config.args)]
    return [
        RewardSpec(
            reward.import_path,
            reward.args,
            key=f"rollout.environment.rewards[{place}].import_path",
            args_key=f"rollout.environment.rewards[{place}].args",
            component=component_name(reward.name, reward.import_path),
            weight=reward.weight,
            batched=reward.batched,
        )
        for place, reward in enumerate(config.rewards)
    ]


def _verifiers(name: str, config: EnvironmentConfig, data: DataConfig, limits: TurnLimits) -> Environment:
    # Everything the adapter imports from verifiers: other versions lack parts of it.
    _require("penstock.rollout.environments.verifiers.adapter", "verifiers>=0.4,<0.5", "environments", config)
    from penstock.rollout.environments.verifiers.adapter import VerifiersEnvironment

    return VerifiersEnvironment(name, config.args, limits, train_size=data.train_size, eval_size=data.eval_size)


def _require(module: str, requirement: str, extra: str, config: EnvironmentConfig) -> None:
    """Raise `ConfigError` if the package behind an environment cannot be imported; it names the extra to install."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = requirement.partition(">")[0]
        raise ConfigError(
            [
                f"rollout.environment.kind: {config.kind} needs the package {package}, which cannot be imported "
                f"({error}); install Penstock with its extra `{extra}`, or pip install '{requirement}'"
            ]
        ) from error

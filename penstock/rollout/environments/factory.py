"""From settings to an environment."""

from __future__ import annotations

from penstock.config.data import DataConfig
from penstock.config.rollout import EnvironmentConfig
from penstock.errors import SetupError
from penstock.rollout.environments.base import Environment
from penstock.rollout.environments.function import FunctionEnvironment
from penstock.rollout.environments.reasoning_gym import ReasoningGymEnvironment
from penstock.rollout.environments.reward_pool import RewardPool
from penstock.rollout.prompts import Prompt, read_jsonl_prompts


def make_environment(config: EnvironmentConfig, data: DataConfig, *, seed: int) -> Environment:
    """The environment that `rollout.environment` describes, with the prompts of `data`."""
    pool = RewardPool(config.workers, config.timeout_seconds)
    if config.kind == "function":
        assert config.function is not None
        assert data.train_path is not None
        train = _read(data, "train_path", data.train_size)
        held_out = _read(data, "eval_path", data.eval_size) if data.eval_path else []
        return FunctionEnvironment(config.function, config.args, pool, train=train, held_out=held_out)
    task = config.kind.partition(":")[2]
    return ReasoningGymEnvironment(
        task, config.args, pool, train_size=data.train_size, eval_size=data.eval_size, seed=seed
    )


def _read(data: DataConfig, key: str, limit: int) -> list[Prompt]:
    path = getattr(data, key)
    try:
        prompts = read_jsonl_prompts(path, prompt_key=data.prompt_key, answer_key=data.answer_key, limit=limit)
    except SetupError as error:
        raise SetupError(f"data.{key}: {error}") from error.__cause__
    if not prompts:
        raise SetupError(f"data.{key}: dataset file {path!r} is empty: there is no prompt in it")
    return prompts

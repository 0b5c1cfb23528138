"""Checks that need more than the configuration's own rules, and no model: what would fail, or hang, later."""

from __future__ import annotations

from penstock.buffer.samplers.factory import check_capacity, make_sampler
from penstock.config.models import RunConfig
from penstock.rollout.environments.factory import make_environment
from penstock.weights.hf import check_model_folder
from penstock.weights.lora import require_peft


def check_config(config: RunConfig) -> None:
    """Raise `ConfigError` or `SetupError` where a run could not start.

    Makes the sampler, and the environment with a prompt or two, so that tasks, reward functions and dataset files are
    really looked at. Model weights are not loaded.
    """
    sampler = make_sampler(config.sampler, config.training.prompt_groups_per_step, config.deterministic)
    check_capacity(sampler, config.buffer.max_buffered_groups, config.training.min_groups_per_chunk)
    check_model_folder(config.model.path)
    if config.model.lora is not None:
        require_peft()
    few = config.data.model_copy(update={"train_size": 1, "eval_size": 1})
    make_environment(config.rollout.environment, few, seed=config.seed)

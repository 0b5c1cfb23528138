"""Checks that need more than the configuration's own rules, and no model: what would fail, or hang, later."""

from __future__ import annotations

from pathlib import Path

from penstock.buffer.samplers.factory import check_capacity, make_sampler
from penstock.config.models import RunConfig
from penstock.controller.estimators import load_estimator
from penstock.observe.loggers.checks import check_loggers
from penstock.rollout.environments.factory import make_environment
from penstock.run.directory import check_run_dir
from penstock.run.rollouts import check_recording
from penstock.runtime.loop import run_loop
from penstock.training.objective import load_loss
from penstock.weights.hf import check_model_folder
from penstock.weights.lora import check_adapter_folder, require_peft


def check_config(config: RunConfig, *, resumed: bool = False, from_scratch: bool = False) -> None:
    """Raise `ConfigError` or `SetupError` where a run could not start, or, with `resumed`, not go on.

    With `from_scratch` a run that is in the folder already is no reason: it will be moved aside.

    Makes the staleness policy, imports a custom loss or advantage, and makes the environment with a prompt or two, so
    that tasks, reward functions and dataset files are really looked at; looks whether the folders can be written and
    the loggers could start. Where rollouts are replayed there is no environment; the recording is looked at instead.
    Model weights are not loaded, and nothing is left behind.
    """
    if not resumed:
        check_run_dir(config.run_dir, from_scratch=from_scratch)
    check_loggers(config.observe)
    sampler = make_sampler(config.staleness, config.training.prompt_groups_per_step, config.deterministic)
    check_capacity(sampler, config.buffer.max_buffered_groups, config.training.min_groups_per_chunk)
    load_loss(config.algorithm)
    load_estimator(config.algorithm)
    check_model_folder(config.model.path)
    if config.model.lora is not None:
        require_peft()
        if config.model.lora.path is not None:
            check_adapter_folder(Path(config.model.lora.path))
    if config.rollout.replay_from is not None:
        check_recording(config)
        return
    environment = make_environment(config.rollout.environment, config.data, seed=config.seed, at_most=1)
    run_loop(environment.close())

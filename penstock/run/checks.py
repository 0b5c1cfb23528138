"""The checks before a run: everything that can be known without loading weights, reported at once.

`penstock config check` prints what they find, and `penstock train` begins with them, so both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from penstock.buffer.samplers.factory import check_capacity, make_sampler
from penstock.config.models import RunConfig
from penstock.config.sections.data import PROCEDURAL_TRAIN_SIZE
from penstock.imports import import_callable
from penstock.observe.loggers.checks import check_loggers
from penstock.rollout.dataset_size import count_records
from penstock.rollout.datasets import read_prompts
from penstock.rollout.engines.context import check_context
from penstock.rollout.environments.extra_columns import ExtraColumn, declared_columns
from penstock.rollout.environments.factory import check_functions, first_records, make_environment
from penstock.run.cautions import (
    beginnings_cut,
    largest_lag,
    nothing_to_lose,
    uncorrected_staleness,
    unreachable_window,
)
from penstock.run.directory import check_run_dir
from penstock.run.given_objects import out_of_reach
from penstock.run.loss_columns import refuse_unknown_columns
from penstock.run.plan import lanes_on_gpu, planned_steps, stop_token_problems
from penstock.run.problems import Problem, Problems
from penstock.run.room import steps_that_may_not_fit, steps_that_never_fit
from penstock.runtime.loop import run_loop
from penstock.weights.chat_template import template_problems
from penstock.weights.model_files import cached_folder, chat_template_in, check_files, text_settings

Part = Literal["train", "eval"]
_MAKE_PROMPTS = ("reasoning_gym:", "calculator")
"""Environments that generate as many prompts as requested."""
_MOST_COUNTED = 100_000
"""The most prompts that are inspected or counted; some forms of data are slow to iterate over."""


def check_config(config: RunConfig, *, resumed: bool = False, from_scratch: bool = False) -> tuple[Problem, ...]:
    """Raise `CannotStart` with everything that keeps a run from starting; otherwise return the warnings.

    With `resumed` the run continues in its folder. With `from_scratch` a run that is already in the folder is no
    obstacle: it will be moved aside.
    """
    found = find_problems(config, resumed=resumed, from_scratch=from_scratch)
    found.raise_errors()
    return found.warnings


def find_problems(
    config: RunConfig, contradictions: Sequence[str] = (), *, resumed: bool = False, from_scratch: bool = False
) -> Problems:
    """Everything that can be said about a run before it is built, after the `contradictions` between its settings.

    Builds the staleness policy, imports `data_plane.on_event` and a custom loss or advantage, reads the data, and
    builds the environment, so tasks, reward functions and dataset files are really inspected. Reads what the model's
    folder says about itself, and checks whether the folders can be written and the loggers could start. If rollouts are
    replayed there is no environment; the recording is inspected instead. Model weights are not loaded, nothing is
    downloaded, and nothing is left behind.
    """
    found = Problems()
    found.error(contradictions)
    if not resumed:
        found.attempt(partial(check_run_dir, config.run_dir, from_scratch=from_scratch))
    found.attempt(partial(check_loggers, config.observe))
    _check_model(config, found)
    _check_device(config, found)
    found.error(steps_that_never_fit(config))
    found.warn(steps_that_may_not_fit(config))
    if config.data_plane.on_event is not None:
        found.attempt(partial(import_callable, config.data_plane.on_event, "data_plane.on_event", "callable"))
    if contradictions:  # policy and environment can only be built from consistent settings
        return found
    found.attempt(partial(_check_policy, config))
    _check_algorithm(config, found)
    data_steps = None
    if config.rollout.replay_from is not None:
        _check_recording(config, found)
    else:
        data_steps = _check_prompts(config, found)
    found.warn(beginnings_cut(config))
    found.warn(nothing_to_lose(config))
    found.warn(uncorrected_staleness(config))
    found.warn(unreachable_window(config, data_steps))
    return found


def _check_policy(config: RunConfig) -> None:
    sampler = make_sampler(config.staleness, config.training.prompt_groups_per_step, config.deterministic)
    check_capacity(sampler, config.buffer.max_buffered_groups, config.training.min_groups_per_chunk)


def _check_algorithm(config: RunConfig, found: Problems) -> None:
    """The user's own loss or advantage; these import torch."""
    found.error(out_of_reach(config))
    if config.algorithm.loss.kind == "custom":
        from penstock.training.objective import load_loss

        found.attempt(partial(load_loss, config.algorithm))
    if config.algorithm.advantage.kind == "custom":
        from penstock.controller.pumps.estimators import load_estimator

        found.attempt(partial(load_estimator, config.algorithm))


def _check_recording(config: RunConfig, found: Problems) -> None:
    from penstock.run.rollouts import check_recording  # imports torch, which other runs' checks can do without

    info = found.attempt(partial(check_recording, config))
    if info is not None:
        _check_room_for_columns(config, info.columns, found)


def _check_model(config: RunConfig, found: Problems) -> None:
    model = config.model
    folder = found.attempt(partial(cached_folder, model))
    if folder is not None:
        found.attempt(partial(check_files, folder, model.path))
        settings = found.attempt(partial(text_settings, folder))
        if settings is not None and config.rollout.replay_from is None:
            found.attempt(partial(check_context, settings, config.rollout.engine.max_model_len))
        if settings is not None and isinstance(settings.get("vocab_size"), int):
            found.error(stop_token_problems(config, settings["vocab_size"]))
        if not model.trust_remote_code:  # else the tokenizer's code may bring its own template
            found.error(template_problems(chat_template_in(folder), config.data, model.path))
    if model.lora is not None:
        from penstock.weights.lora import check_adapter_folder, require_peft

        found.attempt(require_peft)
        if model.lora.path is not None:
            found.attempt(partial(check_adapter_folder, Path(model.lora.path)))


def _check_device(config: RunConfig, found: Problems) -> None:
    """What is wrong with the device; torch, which knows, is asked only if something could be."""
    runtime, dtype = config.runtime, config.model.dtype
    if runtime.device == "cpu" or (runtime.device == "auto" and dtype == "float32" and runtime.trainer_lanes <= 1):
        return
    import torch

    from penstock.weights.hf import pick_device

    device = found.attempt(partial(pick_device, runtime.device))
    if device is None or device.type != "cuda":
        return
    if runtime.trainer_lanes > 1:
        found.error([lanes_on_gpu(runtime.trainer_lanes, str(device))])
    if dtype == "float64":
        found.warn(
            [f"model.dtype: float64 is many times slower than float32 on {device}; it is meant for verification"]
        )
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        found.warn([f"model.dtype: {device} has no native bfloat16 and emulates it slowly; use float32"])


def _check_prompts(config: RunConfig, found: Problems) -> int | None:
    """Check the user's code and the data separately, then the environment as a whole; returns `_data_steps`.

    The modules of reward functions are imported by a reward process, with a time limit, not here.
    """
    environment, data = config.rollout.environment, config.data
    before = len(found.all)
    if environment.kind == "custom" and environment.import_path is not None:
        found.attempt(partial(import_callable, environment.import_path, "rollout.environment.import_path", "class"))
    looked_at = first_records(data, _MOST_COUNTED)
    parts: tuple[Part, ...] = ("train", "eval")
    for part in parts:
        found.attempt(partial(read_prompts, looked_at, part))
    if len(found.all) > before:
        if environment.kind == "function":
            found.attempt(partial(check_functions, environment))
        return None
    # Functions ask for columns, and math for answers, which any record may lack; others make do with a prompt.
    at_most = _MOST_COUNTED if environment.kind in ("function", "math") else 1
    made = found.attempt(partial(make_environment, environment, data, seed=config.seed, at_most=at_most))
    if made is None:
        return None
    run_loop(made.close())
    whose = f"the environment {made.name}"
    found.attempt(partial(refuse_unknown_columns, config.algorithm, declared_columns(made), whose))
    _check_room_for_columns(config, declared_columns(made), found)
    _warn_of_cut_evaluation(config, found)
    return found.attempt(partial(_data_steps, config))


def _check_room_for_columns(config: RunConfig, declared: Sequence[ExtraColumn], found: Problems) -> None:
    """Whether rows fit with the environment's own columns too, if they do without."""
    if not any(steps_that_never_fit(config)):
        found.error(steps_that_never_fit(config, declared))
    if not any(steps_that_may_not_fit(config)):
        found.warn(steps_that_may_not_fit(config, declared))


def _warn_of_cut_evaluation(config: RunConfig, found: Problems) -> None:
    data = config.data
    if data.eval_path is None:
        return
    there = found.attempt(partial(count_records, data, "eval", _MOST_COUNTED))
    if there is not None and there > data.eval_size:
        more = " or more" if there == _MOST_COUNTED else ""
        found.warn(
            [
                f"data.eval_size: only the first {data.eval_size:,} of {there:,}{more} prompts in {data.eval_path!r} "
                f"are evaluated; set it to {there}{more} for all"
            ]
        )


def _data_steps(config: RunConfig) -> int | None:
    """How many steps the data lasts for; None if that is not known, or no fewer than the staleness window has."""
    data, n = config.data, config.training.prompt_groups_per_step
    enough = largest_lag(config) + 1
    wanted = min(config.training.max_steps or enough, enough)
    if data.train_path is not None:
        most = min(-(-n * wanted // data.epochs), _MOST_COUNTED)
        prompts = count_records(data, "train", min(most, data.train_size or most))
        if prompts == _MOST_COUNTED:
            return None
    elif config.rollout.environment.kind.startswith(_MAKE_PROMPTS):
        prompts = data.train_size or PROCEDURAL_TRAIN_SIZE
    else:
        return None
    steps = planned_steps(config, prompts * data.epochs)
    return steps if steps < wanted else None

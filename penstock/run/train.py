"""`train(config)` and `resume(run_dir)`: a whole run, in its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError
from penstock.observe.loggers.base import Logger, flat_settings
from penstock.observe.sinks import hold_standard_descriptors
from penstock.run.aside import refuse_settings_inside, set_aside
from penstock.run.checks import check_config
from penstock.run.directory import RunDirectory
from penstock.run.finished import finished_run
from penstock.run.given_objects import require_given, resume_call
from penstock.run.life import RunLife
from penstock.run.result import RunResult
from penstock.run.resume import found_good, own_config
from penstock.runtime.loop import run_loop

__all__ = ["RunResult", "resume", "train"]


def train(
    config: RunConfig,
    loggers: Sequence[Logger] = (),
    *,
    from_scratch: bool = False,
    json_to: TextIO | None = None,
) -> RunResult:
    """Run to the end. A run that fails leaves its directory, with a summary that says why, and raises.

    `loggers` are your own, in addition to those that `config.observe` asks for. With `from_scratch` a run that is
    already in the folder is moved aside first, as a whole. With `json_to` each step and evaluation is written there as
    a line of JSON, instead of what `config.observe.console` shows.
    """
    hold_standard_descriptors()
    require_given(config, "penstock.train(..., ")
    config = _with_absolute_places(config)
    warnings = check_config(config, from_scratch=from_scratch)
    aside = None
    if from_scratch:
        refuse_settings_inside(Path(config.run_dir), flat_settings(parse_yaml(dump_config(config))))
        aside = set_aside(config.run_dir)
    directory = RunDirectory(config.run_dir)
    try:
        directory.write_config(dump_config(config))
        return run_loop(RunLife(config, directory, loggers, None, aside, json_to, warnings).execute())
    finally:
        directory.close()


def _with_absolute_places(config: RunConfig) -> RunConfig:
    """The same, wherever it is read: user code may change the working directory, and a resume may have another."""
    model, rollout = config.model, config.rollout
    lora = model.lora and model.lora.model_copy(update={"path": _absolute(model.lora.path)})
    model = model.model_copy(update={"path": _absolute(model.path), "lora": lora})
    rollout = rollout.model_copy(update={"replay_from": _absolute(rollout.replay_from)})
    paths = {name: _absolute(getattr(config.data, name)) for name in ("train_path", "eval_path")}
    data = config.data.model_copy(update=paths)
    run_dir = str(Path(config.run_dir).absolute())
    return config.model_copy(update={"run_dir": run_dir, "model": model, "data": data, "rollout": rollout})


def _absolute(path: str | None) -> str | None:
    """An existing path, made absolute; anything else, such as a name on a hub, unchanged."""
    return os.path.abspath(path) if path is not None and os.path.exists(path) else path


def resume(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    loggers: Sequence[Logger] = (),
    *,
    checkpoint: str | None = None,
    from_scratch: bool = False,
    json_to: TextIO | None = None,
) -> RunResult:
    """Resume a run from its newest complete checkpoint, or the one named, however its last process ended.

    Metrics, samples and ledger are rolled back to the checkpoint once everything is found to fit it: a refused resume
    changes nothing. A run that never had a checkpoint starts over. `overrides` may change settings that the checkpoint
    does not depend on, such as `training.max_steps`. A finished run is left unchanged, and `nothing_left` of the result
    says so. With `from_scratch` the run starts over in any case, and with any settings; the old one is moved aside as a
    whole. `json_to` is as for `train`.
    """
    hold_standard_descriptors()
    folder = Path(run_dir).absolute()
    config = own_config(folder, overrides)
    require_given(config, resume_call(run_dir))
    if from_scratch:
        if checkpoint is not None:
            raise ConfigError(["--from-scratch starts over and --checkpoint resumes; use only one of them"])
        return train(config, loggers, from_scratch=True, json_to=json_to)
    directory = RunDirectory(folder, reopen=True)
    try:
        point = found_good(directory, config, checkpoint)
        warnings = check_config(config, resumed=True)
        if (finished := finished_run(directory, config, point, json_to)) is not None:
            return finished
        return run_loop(RunLife(config, directory, loggers, point, json_to=json_to, warnings=warnings).execute())
    finally:
        directory.close()

"""The calls that `penstock` offers in Python: whole runs, from settings or from objects, in scripts and notebooks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import given
from penstock.buffer.samplers.base import StalenessSampler
from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config, load_config, parse_config, read_settings
from penstock.config.reading.overrides import apply_overrides
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError
from penstock.observe.loggers.base import Logger
from penstock.observe.report.build import WrittenReport, write_report
from penstock.observe.streams import say_last
from penstock.rollout.environments.base import Environment
from penstock.run import train as runs
from penstock.run.evaluate import EvalResult, evaluate_model
from penstock.run.given_objects import GivenObjects, Rewards, require_given
from penstock.run.result import RunResult
from penstock.run.verify.findings import VerifyReport
from penstock.run.verify.preflight import verify as run_checks
from penstock.run.verify.subject import Limits
from penstock.runtime.relay import alongside_running_loop

Settings = RunConfig | str | os.PathLike[str] | Mapping[str, Any]
"""A configuration, the path of its YAML file, or its content as a mapping."""
MakesEnvironment = Callable[..., Environment]
MakesSampler = Callable[..., StalenessSampler]


def train(
    config: Settings,
    overrides: Sequence[str] = (),
    loggers: Sequence[Logger] = (),
    *,
    reward: Rewards | None = None,
    environment: MakesEnvironment | None = None,
    staleness: MakesSampler | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    from_scratch: bool = False,
) -> RunResult:
    """Train a model: a whole run, in the folder `run_dir`, as `penstock train` does.

    `config` is a `RunConfig`, the path of a YAML file, or the settings as a mapping; `overrides` are applied on top
    (`"training.max_steps=20"`). `loggers` are your own, in addition to those that `observe` asks for. With
    `from_scratch`, a run that is already in the folder is moved aside first, as a whole.

    A function or class replaces what the settings name: `reward` is a reward function (environment `function`), or a
    list of functions, of `(function, weight)` pairs and of mappings such as `{"function": f, "batched": True}`, with
    the settings of `rollout.environment.rewards`; `environment` is an environment class (environment `custom`),
    `staleness` the class of a staleness policy; `loss` and `advantage` are those of `algorithm`. Settings of the
    section that belong to another choice are dropped, unless `overrides` give them; `args` of the same choice are kept.
    An object that other processes can import is saved under its name, and `penstock resume` finds it. Any other (a
    lambda, a class of a notebook) stays in this process, and must be given to `resume` again.

    Ctrl-C and SIGTERM stop the run with a checkpoint; the result then says `interrupted`, and its `resume_command` says
    how to continue. Inside a running event loop, as in a notebook, the run gets its own thread and loop; the call waits
    for it and hands these signals on.

    A run that fails leaves its folder, with a summary that says why, and raises.
    """
    objects = GivenObjects(reward, environment, staleness, loss, advantage)
    with given.available(objects.by_path):
        settings = _config(config, overrides, objects)
        result = alongside_running_loop(runs.train, settings, loggers, from_scratch=from_scratch)
    return _told(result)


def resume(
    run_dir: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    loggers: Sequence[Logger] = (),
    *,
    checkpoint: str | None = None,
    reward: Rewards | None = None,
    environment: MakesEnvironment | None = None,
    staleness: MakesSampler | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    from_scratch: bool = False,
) -> RunResult:
    """Resume a run from its newest complete checkpoint, or the one named, however its last process ended.

    Metrics, samples and ledger are rolled back to the checkpoint once everything is found to fit it: a refused resume
    changes nothing. A run that never had a checkpoint starts over. `overrides` may change settings that the checkpoint
    does not depend on, such as `training.max_steps`. With `from_scratch` the run starts over in any case, and with any
    settings; the old one is moved aside as a whole.

    Objects that were passed to `train` and have no name that another process could import (the run's `config.yaml` has
    them as `penstock.given:name`) must be passed again. A staleness policy, a loss and an advantage must keep their
    names: the checkpoint depends on them.
    """
    objects = GivenObjects(reward, environment, staleness, loss, advantage)
    with given.available(objects.by_path):
        laid_over = [*overrides, *_resume_overrides(Path(run_dir), overrides, objects)]
        result = alongside_running_loop(
            runs.resume, Path(run_dir), laid_over, loggers, checkpoint=checkpoint, from_scratch=from_scratch
        )
    return _told(result)


def evaluate(
    target: Settings,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | None = None,
    reward: Rewards | None = None,
    environment: MakesEnvironment | None = None,
) -> EvalResult:
    """Evaluate a model on the held-out prompts, as `penstock eval` does.

    `target` is a configuration (a `RunConfig`, a path, a mapping), whose `model` is evaluated, or the folder of a run,
    whose newest checkpoint is, or the one named: `step_40`, or `best` by `checkpoint.best_metric`. `reward` and
    `environment` are as for `train`.
    """
    objects = GivenObjects(reward, environment)
    run_dir = _run_folder(target)
    if checkpoint is not None and run_dir is None:
        raise ConfigError(["checkpoint: needs the folder of a run, not a configuration"])
    with given.available(objects.by_path):
        settings = _config(target if run_dir is None else run_dir / "config.yaml", overrides, objects)
        require_given(settings, "penstock.evaluate(..., ", ("reward", "environment"))
        return alongside_running_loop(evaluate_model, settings, run_dir, checkpoint)


def verify(
    config: Settings,
    overrides: Sequence[str] = (),
    *,
    groups: int = 8,
    seconds: float = 600.0,
    notify: Callable[[str], None] | None = None,
    reward: Rewards | None = None,
    environment: MakesEnvironment | None = None,
    staleness: MakesSampler | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
) -> VerifyReport:
    """Check a run on its own model and data before you start it, as `penstock verify` does; writes nothing.

    At most `groups` prompt groups are generated, and the checks may take `seconds` once the model is loaded. `notify`
    is called with what is being done. The report's `ok` says whether every check passed; `config` and the objects are
    as for `train`. Raises `ConfigError` or `SetupError` if the run could not be built at all.
    """
    objects = GivenObjects(reward, environment, staleness, loss, advantage)
    with given.available(objects.by_path):
        settings = _config(config, overrides, objects)
        require_given(settings, "penstock.verify(..., ")
        return alongside_running_loop(run_checks, settings, Limits(groups, seconds), notify)


def report(run_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> WrittenReport:
    """Write one HTML page about a run, by default `report.html` in its folder; also for runs still going or failed.

    Raises `ConfigError` if there is no run, or if the page cannot be written.
    """
    return write_report(Path(run_dir), None if output is None else Path(output))


def _told(result: RunResult) -> RunResult:
    """The result; a run that was cut short says how to resume it, if it shows anything."""
    file = result.run_dir / "config.yaml"
    if result.is_cut_short and file.is_file() and load_config(file).observe.console != "off":
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; the run has ended well
            say_last(f"resume with: {result.resume_command}\n")
    return result


def _config(config: Settings, overrides: Sequence[str], objects: GivenObjects) -> RunConfig:
    """The configuration, with overrides and then objects applied, checked once it is complete."""
    _require_text(overrides)
    if isinstance(config, RunConfig):
        if not overrides and not objects.by_path:
            return config
        settings, source = parse_yaml(dump_config(config)), None
    elif isinstance(config, Mapping):
        settings, source = dict(config), None
    else:
        settings, source = read_settings(config), os.fspath(config)
    settings = apply_overrides(_with_objects(settings, objects), overrides, RunConfig)
    return parse_config(_with_objects(settings, objects), source)


def _with_objects(settings: Mapping[str, Any], objects: GivenObjects) -> dict[str, Any]:
    """A copy of the settings with the sections that name the objects.

    Applied before overrides and after them: what the file says for another choice is dropped, what overrides say is
    meant for the objects, and no override replaces an object.
    """
    named = dict(settings)
    for key, section in objects.sections(named).items():
        named = _replaced(named, key.split("."), section)
    return named


def _replaced(settings: Mapping[str, Any], key: Sequence[str], section: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings with the section at a key replaced."""
    name, *rest = key
    if not rest:
        return {**settings, name: section}
    below = settings.get(name)
    return {**settings, name: _replaced(below if isinstance(below, Mapping) else {}, rest, section)}


def _resume_overrides(run_dir: Path, overrides: Sequence[str], objects: GivenObjects) -> list[str]:
    _require_text(overrides)
    source = run_dir / "config.yaml"
    if not objects.by_path or not source.is_file():
        return []
    return objects.overrides(apply_overrides(_with_objects(read_settings(source), objects), overrides, RunConfig))


def _require_text(overrides: Sequence[str]) -> None:
    if isinstance(overrides, str) or not all(isinstance(each, str) for each in overrides):
        raise TypeError('overrides is a list of texts such as "training.max_steps=20"; loggers go to loggers=')


def _run_folder(target: Settings) -> Path | None:
    if isinstance(target, RunConfig | Mapping) or not os.path.isdir(target):
        return None
    if not (Path(target) / "config.yaml").is_file():
        raise ConfigError(["is not the folder of a run: it has no config.yaml"], os.fspath(target))
    return Path(target)

"""From objects passed in from Python to settings that name them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from penstock import given
from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.config.sections.algorithm import AdvantageConfig, CustomAdvantage, CustomLoss, LossConfig
from penstock.config.sections.base import Section
from penstock.config.sections.staleness import CustomStaleness, StalenessConfig
from penstock.errors import ConfigError
from penstock.run.commands import resume_command

IMPORT_PATH = "import_path"
"""The setting that names code, in every section."""


@dataclass(frozen=True)
class _ObjectSection:
    """The section of the settings that names an object of one kind."""

    section: str
    chosen_by: str
    choice: str
    shared: tuple[str, ...] = ()
    """Settings of the section that belong to every choice."""
    not_its_own: frozenset[str] = frozenset()
    """Settings of other choices that this one lacks."""


def _others(choices: Any, own: type[Section]) -> frozenset[str]:
    """Settings that one of the choices has and `own` does not."""
    sections: tuple[type[Section], ...] = get_args(get_args(choices)[0])
    return frozenset(name for section in sections for name in section.model_fields) - own.model_fields.keys()


_SEVERAL = "rewards"
"""The setting that holds several reward functions, in place of one."""
_OF_ENVIRONMENTS = ("timeout_seconds", "workers", "in_process")
_SECTIONS = {
    "reward": _ObjectSection("rollout.environment", "kind", "function", _OF_ENVIRONMENTS),
    "environment": _ObjectSection("rollout.environment", "kind", "custom", _OF_ENVIRONMENTS),
    "staleness": _ObjectSection("staleness", "policy", "custom", (), _others(StalenessConfig, CustomStaleness)),
    "loss": _ObjectSection(
        "algorithm.loss", "kind", "custom", ("aggregation", "constant_length"), _others(LossConfig, CustomLoss)
    ),
    "advantage": _ObjectSection("algorithm.advantage", "kind", "custom", (), _others(AdvantageConfig, CustomAdvantage)),
}


_WANTED = dict.fromkeys(_SECTIONS, "a function or a class") | {
    "reward": "a function, or a list of functions, of (function, weight) pairs and of mappings with a function and its "
    "settings"
}
_FUNCTION = "function"
"""The entry of such a mapping that is the function."""
Reward = Callable[..., object] | tuple[Callable[..., object], float] | Mapping[str, Any]
"""One of several: a function, `(function, weight)`, or `{"function": f, "weight": 0.5, "batched": True}` with any
settings of `rollout.environment.rewards`."""
Rewards = Callable[..., object] | Sequence[Reward]
"""A reward function, or a list of several."""


@dataclass(frozen=True)
class GivenObjects:
    """Functions and classes that replace those that settings name; None leaves the settings unchanged."""

    reward: Rewards | None = None
    environment: Callable[..., object] | None = None
    staleness: Callable[..., object] | None = None
    loss: Callable[..., object] | None = None
    advantage: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and self.environment is not None:
            raise ConfigError(["reward and environment both define where rewards come from; use only one of them"])
        wrong = [
            f"{name}: give {_WANTED[name]}, not {thing!r}" for name, thing in self._objects() if not callable(thing)
        ]
        if wrong:
            raise ConfigError(wrong)
        paths = [given.import_path(thing) for _, thing in self._objects()]
        shared = [path for path in paths if paths.count(path) > 1 and not given.is_only_here(path)]
        if shared:
            raise ConfigError([f"{shared[0].partition(':')[2]}: two objects have this name; rename one of them"])

    def _given(self) -> Iterator[tuple[str, Any]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None)

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Every single object."""
        for name, thing in self._given():
            for one in [each for each, _ in _entries(thing)] if isinstance(thing, list | tuple) else [thing]:
                yield name, one

    def _paths(self) -> Iterator[tuple[str, Any]]:
        """Every single object with its import path; among those that only this process has, the second `lambda` is
        `lambda_2`."""
        seen: list[str] = []
        for _, thing in self._objects():
            path = given.import_path(thing)
            seen.append(path)
            count = seen.count(path)
            yield path if count == 1 else f"{path}_{count}", thing

    @property
    def by_path(self) -> dict[str, object]:
        """The objects, keyed by the import path that settings use for them."""
        return dict(self._paths())

    def sections(self, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The sections that change, by dotted key, with their new content.

        A section that chose something else before keeps only what belongs to every choice. Raises `ConfigError` if one
        that chose nothing has settings that an object has no use for.
        """
        changed = {}
        paths = (path for path, _ in self._paths())
        for name, thing in self._given():
            where = _SECTIONS[name]
            before = _section(settings, where.section)
            same = before.get(where.chosen_by, where.choice) == where.choice
            kept = before if same else {key: before[key] for key in where.shared if key in before}
            kept = {key: value for key, value in kept.items() if key not in (IMPORT_PATH, _SEVERAL)}
            _refuse_unused([key for key in kept if key in where.not_its_own], name, where.section)
            changed[where.section] = {**kept, where.chosen_by: where.choice, **_named(thing, before, paths)}
        return changed

    def overrides(self, settings: Mapping[str, Any]) -> list[str]:
        """The same, as overrides."""
        return [f"{key}={json.dumps(section)}" for key, section in self.sections(settings).items()]


def _refuse_unused(keys: Sequence[str], name: str, section: str) -> None:
    reason = f"belongs to the built-in choices of {section}, and you pass {name}=...; remove it, or give it in"
    if keys:
        raise ConfigError([f"{section}.{key}: {reason} {section}.args" for key in keys])


def _named(thing: Any, before: Mapping[str, Any], paths: Iterator[str]) -> dict[str, Any]:
    """The settings that name an object, or several rewards, which keep the settings they had, by the next paths."""
    if not isinstance(thing, list | tuple):
        return {IMPORT_PATH: next(paths)}
    had = {each.get(IMPORT_PATH): each for _, each in _several(before)}
    named = [(next(paths), settings) for _, settings in _entries(thing)]
    return {_SEVERAL: [{**had.get(path, {}), IMPORT_PATH: path, **settings} for path, settings in named]}


def _entries(rewards: Sequence[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Each function with the settings passed along with it."""
    return [_entry(each) for each in rewards]


def _entry(reward: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(reward, Mapping) and _FUNCTION in reward:
        return reward[_FUNCTION], {name: value for name, value in reward.items() if name != _FUNCTION}
    if isinstance(reward, tuple) and len(reward) == 2:
        return reward[0], {"weight": reward[1]}
    return reward, {}


def _section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Any = settings
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def require_given(config: RunConfig, call: str, names: Sequence[str] = tuple(_SECTIONS)) -> None:
    """Raise `ConfigError` if settings name an object that was passed in from Python, but not to this call.

    `call` is the call to make, up to the object: `penstock.evaluate(..., `.
    """
    problems = [
        f"{key}: {given.lost_words(path)}: {call}{name}=...)"
        for name, key, path in _only_here(config)
        if name in names and given.is_lost(path)
    ]
    if problems:
        raise ConfigError(problems)


def out_of_reach(config: RunConfig) -> list[str]:
    """Objects that only this process has, but a worker elsewhere must import, as `key: reason` lines."""
    if not config.runtime.trainer_process:
        return []
    return [
        f"{key}: {path.rpartition(':')[2]} was passed in from Python and has no name that the trainer's process could "
        "import (runtime.trainer_process); put it into a module, so that it is named module:function, or set "
        "runtime.trainer_process to false"
        for name, key, path in _only_here(config)
        if name == "loss"
    ]


def resume_call(run_dir: str | Path, *overrides: str) -> str:
    """The call that resumes a run from Python, up to the objects it needs."""
    changed = f"{list(overrides)!r}, " if overrides else ""
    return f"penstock.resume({str(run_dir)!r}, {changed}"


def way_to_resume(config: RunConfig, run_dir: str | Path, *overrides: str) -> str:
    """The command that resumes a run, or the Python call if it was given objects that only Python can pass again.

    Example: a run that was given a lambda as its reward has `penstock.resume('/runs/first', reward=...)`.
    """
    names = dict.fromkeys(name for name, _, _ in _only_here(config))
    if not names:
        return resume_command(run_dir, *overrides)
    return f"{resume_call(run_dir, *overrides)}{', '.join(f'{name}=...' for name in names)})"


def _only_here(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Objects that no other process can import: the keyword for each, the setting that names it, and its path."""
    settings = parse_yaml(dump_config(config))
    for name in _SECTIONS:
        where = _SECTIONS[name]
        section = _section(settings, where.section)
        if section.get(where.chosen_by) != where.choice:
            continue
        several = {f"{_SEVERAL}[{i}].{IMPORT_PATH}": each.get(IMPORT_PATH) for i, each in _several(section)}
        for key, path in ({IMPORT_PATH: section.get(IMPORT_PATH)} | several).items():
            if isinstance(path, str) and given.is_only_here(path):
                yield name, f"{where.section}.{key}", path


def _several(section: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    return [(i, each) for i, each in enumerate(section.get(_SEVERAL) or ()) if isinstance(each, Mapping)]

"""From objects that were given from Python to settings that name them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from penstock import given
from penstock.config.loading import dump_config
from penstock.config.models import RunConfig
from penstock.config.yaml_dialect import parse_yaml
from penstock.errors import ConfigError

IMPORT_PATH = "import_path"
"""The setting that names code, in every section."""


@dataclass(frozen=True)
class _Place:
    """The section of the settings that names an object of one kind."""

    section: str
    chosen_by: str
    choice: str
    shared: tuple[str, ...] = ()
    """Settings of the section that belong to every choice."""


_SEVERAL = "rewards"
"""The setting that holds several reward functions, in place of one."""
_OF_ENVIRONMENTS = ("timeout_seconds", "workers", "in_process")
_PLACES = {
    "reward": _Place("rollout.environment", "kind", "function", _OF_ENVIRONMENTS),
    "environment": _Place("rollout.environment", "kind", "custom", _OF_ENVIRONMENTS),
    "staleness": _Place("staleness", "policy", "custom"),
    "loss": _Place("algorithm.loss", "kind", "custom", ("aggregation", "constant_length")),
    "advantage": _Place("algorithm.advantage", "kind", "custom"),
}


_WANTED = dict.fromkeys(_PLACES, "a function or a class") | {
    "reward": "a function, or a list of functions and of (function, weight) pairs"
}
Rewards = Callable[..., object] | Sequence[Callable[..., object] | tuple[Callable[..., object], float]]


@dataclass(frozen=True)
class GivenObjects:
    """Functions and classes that take the place of those that settings name; None leaves the settings as they are."""

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
        shared = [path for path in paths if paths.count(path) > 1]
        if shared:
            raise ConfigError([f"{shared[0].partition(':')[2]}: two objects have this name; rename one of them"])

    def _given(self) -> Iterator[tuple[str, Any]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None)

    def _objects(self) -> Iterator[tuple[str, Any]]:
        """Every single object."""
        for name, thing in self._given():
            for one in [each for each, _ in _weighted(thing)] if isinstance(thing, list | tuple) else [thing]:
                yield name, one

    @property
    def by_path(self) -> dict[str, object]:
        """The objects by the import path that settings know them by."""
        return {given.import_path(thing): thing for _, thing in self._objects()}

    def sections(self, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The sections that change, by dotted key, as they become.

        A section that chose something else before keeps only what belongs to every choice.
        """
        changed = {}
        for name, thing in self._given():
            place = _PLACES[name]
            before = _section(settings, place.section)
            same = before.get(place.chosen_by, place.choice) == place.choice
            kept = before if same else {key: before[key] for key in place.shared if key in before}
            kept = {key: value for key, value in kept.items() if key not in (IMPORT_PATH, _SEVERAL)}
            changed[place.section] = {**kept, place.chosen_by: place.choice, **_named(thing, before)}
        return changed

    def overrides(self, settings: Mapping[str, Any]) -> list[str]:
        """The same, as overrides."""
        return [f"{key}={json.dumps(section)}" for key, section in self.sections(settings).items()]


def _named(thing: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that name an object, or several rewards, which keep the settings they had."""
    if not isinstance(thing, list | tuple):
        return {IMPORT_PATH: given.import_path(thing)}
    had = {each.get(IMPORT_PATH): each for _, each in _several(before)}
    named = [(given.import_path(function), weight) for function, weight in _weighted(thing)]
    weights = [{} if weight is None else {"weight": weight} for _, weight in named]
    return {
        _SEVERAL: [{**had.get(path, {}), IMPORT_PATH: path, **w} for (path, _), w in zip(named, weights, strict=True)]
    }


def _weighted(rewards: Sequence[Any]) -> list[tuple[Any, float | None]]:
    return [each if isinstance(each, tuple) and len(each) == 2 else (each, None) for each in rewards]


def _section(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Any = settings
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def require_given(config: RunConfig, names: Sequence[str] = tuple(_PLACES)) -> None:
    """Raise `ConfigError` where settings name an object that was given from Python, but not to this call."""
    settings = parse_yaml(dump_config(config))
    problems = []
    for name in names:
        place = _PLACES[name]
        section = _section(settings, place.section)
        if section.get(place.chosen_by) != place.choice:
            continue
        several = {f"{_SEVERAL}[{i}].{IMPORT_PATH}": each.get(IMPORT_PATH) for i, each in _several(section)}
        for key, path in ({IMPORT_PATH: section.get(IMPORT_PATH)} | several).items():
            if isinstance(path, str) and given.is_lost(path):
                again = f"{name}={'[...]' if several else path.partition(':')[2]}"
                call = f"penstock.resume({config.run_dir!r}, {again})"
                problems.append(f"{place.section}.{key}: {given.lost_words(path)}, with {again}: {call}")
    if problems:
        raise ConfigError(problems)


def _several(section: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    return [(i, each) for i, each in enumerate(section.get(_SEVERAL) or ()) if isinstance(each, Mapping)]

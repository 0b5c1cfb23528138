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


_OF_ENVIRONMENTS = ("timeout_seconds", "workers", "in_process")
_PLACES = {
    "reward": _Place("rollout.environment", "kind", "function", _OF_ENVIRONMENTS),
    "environment": _Place("rollout.environment", "kind", "custom", _OF_ENVIRONMENTS),
    "staleness": _Place("staleness", "policy", "custom"),
    "loss": _Place("algorithm.loss", "kind", "custom"),
    "advantage": _Place("algorithm.advantage", "kind", "custom"),
}


@dataclass(frozen=True)
class GivenObjects:
    """Functions and classes that take the place of those that settings name; None leaves the settings as they are."""

    reward: Callable[..., object] | None = None
    environment: Callable[..., object] | None = None
    staleness: Callable[..., object] | None = None
    loss: Callable[..., object] | None = None
    advantage: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and self.environment is not None:
            raise ConfigError(["reward and environment both say where rewards come from; give one of the two"])
        wrong = [name for name, thing in self._given() if not callable(thing)]
        if wrong:
            thing = getattr(self, wrong[0])
            raise ConfigError([f"{wrong[0]}: give a function or a class, not a {type(thing).__name__}"])
        paths = [given.import_path(thing) for _, thing in self._given()]
        shared = [path for path in paths if paths.count(path) > 1]
        if shared:
            raise ConfigError([f"{shared[0].partition(':')[2]}: two objects have this name; rename one of them"])

    def _given(self) -> Iterator[tuple[str, Any]]:
        return ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def by_path(self) -> dict[str, object]:
        """The objects by the import path that settings know them by."""
        return {given.import_path(thing): thing for _, thing in self._given()}

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
            path = {place.chosen_by: place.choice, IMPORT_PATH: given.import_path(thing)}
            changed[place.section] = {**kept, **path}
        return changed

    def overrides(self, settings: Mapping[str, Any]) -> list[str]:
        """The same, as overrides."""
        return [f"{key}={json.dumps(section)}" for key, section in self.sections(settings).items()]


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
        path = section.get(IMPORT_PATH)
        if section.get(place.chosen_by) == place.choice and isinstance(path, str) and given.is_lost(path):
            again = f"{name}={path.partition(':')[2]}"
            call = f"penstock.resume({config.run_dir!r}, {again})"
            problems.append(f"{place.section}.{IMPORT_PATH}: {given.lost_words(path)}, with {again}: {call}")
    if problems:
        raise ConfigError(problems)

"""Settings given on the command line: `training.max_steps=100`, laid over what the file says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from penstock.config.reading.keys import KeySpec
from penstock.config.reading.messages import show
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.config.reading.yaml_limits import DialectError
from penstock.config.sections.base import Section
from penstock.errors import ConfigError
from penstock.text import cut


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str], root: type[Section]) -> dict[str, Any]:
    """A copy of `data` with the overrides laid over it, the last one of a key winning; raises `ConfigError`.

    Values are YAML, so `[1, 2]`, `null` and `{policy: windowed}` work; for a setting that is text the value is taken as
    it stands. Whether the settings exist is left to the models, which know the nearest name.
    """
    result = copy.deepcopy(dict(data))
    problems: list[str] = []
    for override in overrides:
        try:
            key, value = _parse(override, root)
            _set(result, key, value)
        except _OverrideProblem as problem:
            problems.append(str(problem))
    if problems:
        raise ConfigError(problems, source="command line")
    return result


class _OverrideProblem(Exception):
    pass


def _parse(override: str, root: type[Section]) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise _OverrideProblem(f"{cut(override, 100)}: is not key=value; write for example training.max_steps=100")
    names = key.strip().split(".")
    if not all(names):
        raise _OverrideProblem(
            f"{cut(override, 100)}: has an empty name before the '='; write for example training.max_steps=100"
        )
    key = ".".join(names)
    spec = _spec(names, root)
    if not text.strip():
        raise _OverrideProblem(f"{key}: has no value; write {key}=null to unset it")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        if spec is None or not spec.takes_text:
            reason = f": {error.problem}" if isinstance(error, DialectError) else ""
            raise _OverrideProblem(f"{key}: the value {show(text)} is not valid YAML{reason}") from None
        value = text
    if spec is not None and spec.takes_text and value is not None and not isinstance(value, str):
        value = text
    return names, value


def _spec(names: Sequence[str], root: type[Section]) -> KeySpec | None:
    """What the models have at the key; None where they have nothing, or cannot say."""
    spec = KeySpec((), (root,))
    for depth, name in enumerate(names):
        if not spec.sections:
            if spec.is_mapping:
                return None
            above, key = ".".join(names[:depth]), ".".join(names)
            if spec.is_list:
                raise _OverrideProblem(f"{key}: {above} is a list; give it as a whole, {above}=[...]")
            raise _OverrideProblem(f"{key}: {above} is a single value, not a section")
        below = spec.below(name)
        if below is None:
            return None
        spec = below
    return spec


def _set(data: dict[str, Any], names: Sequence[str], value: Any) -> None:
    *sections, last = names
    for depth, name in enumerate(sections, start=1):
        below = data.setdefault(name, {})
        if below is None:
            below = data[name] = {}
        if not isinstance(below, dict):
            above = ".".join(names[:depth])
            raise _OverrideProblem(f"{'.'.join(names)}: {above} is {show(below)} in the file, not a section")
        data = below
    data[last] = value

"""From a YAML file and overrides to a `RunConfig`, and back to YAML."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from penstock.config.models import CONTRADICTIONS_ALLOWED, RunConfig
from penstock.config.reading.messages import problems_of, show
from penstock.config.reading.overrides import apply_overrides
from penstock.config.reading.values import unusable
from penstock.config.reading.yaml_dialect import parse_yaml, write_yaml
from penstock.config.reading.yaml_limits import DialectError
from penstock.config.rules.whole_config import contradictions, idle_settings
from penstock.errors import ConfigError

_LARGEST_FILE = 2**20
"""In bytes: reading a configuration stays a matter of seconds, also where a path names something else."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, lay `a.b.c=value` overrides over it and check the result; raises `ConfigError`."""
    return parse_config(read_settings(path, overrides), source=str(path))


def read_settings(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a YAML file and overrides say, not checked yet; raises `ConfigError`."""
    return apply_overrides(_read_mapping(Path(path)), overrides, RunConfig)


def load_contradictory(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """As `load_config`, but settings that contradict each other are given with the contradictions, one a line.

    For those who have more to say about the settings than that; no run can be built with contradictory ones.
    """
    data = apply_overrides(_read_mapping(Path(path)), overrides, RunConfig)
    config = parse_config(data, str(path), contradictions_allowed=True)
    return config, contradictions(config)


def parse_config(
    data: Mapping[str, Any], source: str | None = None, *, contradictions_allowed: bool = False
) -> RunConfig:
    """Check settings that are already a mapping; `source` is named in the error."""
    problems = unusable(data)
    if problems:
        raise ConfigError(problems, source)
    try:
        return RunConfig.model_validate(dict(data), context={CONTRADICTIONS_ALLOWED: contradictions_allowed})
    except ValidationError as error:
        raise ConfigError(problems_of(error, RunConfig), source) from None


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, defaults included, in the order of the models.

    Settings that have no effect alongside the others are left out, so that `load_config` takes the result as it stands.
    """
    try:
        data = config.model_dump(mode="json")
    except PydanticSerializationError as error:
        raise ConfigError([f"a value cannot be written as YAML: {error}"]) from None
    for key in idle_settings(config):
        *sections, name = key.split(".")
        section = data
        for part in sections:
            section = section[part]
        del section[name]
    return write_yaml(data)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors that complete and check YAML."""
    return RunConfig.model_json_schema()


def _read_mapping(path: Path) -> dict[str, Any]:
    data = _parse(_read_text(path), str(path))
    if data is None:
        raise ConfigError(["the file is empty; it needs at least model.path and rollout.environment.kind"], str(path))
    if not isinstance(data, dict):
        raise ConfigError([f"expected sections such as 'model:' at the top of the file, got {show(data)}"], str(path))
    return data


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        raise ConfigError([f"no such file{_near_files(path)}"], str(path)) from None
    except IsADirectoryError:
        inside = path / "config.yaml"
        hint = f"; did you mean {inside}?" if inside.is_file() else ", not a file"
        raise ConfigError([f"is a folder{hint}"], str(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError([f"cannot be read: {reason}"], str(path)) from None
    if len(raw) > _LARGEST_FILE:
        raise ConfigError([f"is larger than {_LARGEST_FILE:,} bytes, so it is not a configuration"], str(path))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8 text: byte 0x{raw[error.start]:02x} in line {line}; save it as UTF-8"
        raise ConfigError([reason], str(path)) from None


def _parse(text: str, source: str) -> Any:
    try:
        return parse_yaml(text)
    except DialectError as error:
        raise ConfigError([f"{_position(error.problem_mark)}: {error.problem}"], source) from None
    except yaml.MarkedYAMLError as error:
        reason = error.problem or error.context or "cannot be understood"
        if reason.startswith("but ") and error.context:
            reason = f"{error.context} {reason}"
        if "'\\t'" in reason:
            reason += "; indent with spaces"
        mark = error.problem_mark or error.context_mark
        raise ConfigError([f"{_position(mark)}: not valid YAML: {reason}"], source) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([f"line {line}: not valid YAML: {str(error).splitlines()[0]}"], source) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"not valid YAML: {str(error).splitlines()[0]}"], source) from None


def _position(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist either"
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3)
    configs = [name for name in names if name.endswith((".yaml", ".yml"))]
    if close:
        return f"; did you mean {' or '.join(str(folder / name) for name in close)}?"
    return f"; {folder} has {', '.join(configs[:5])}" if configs else ""

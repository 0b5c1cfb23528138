"""The smallest valid settings, and a way to see the problems of others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.loading import load_config, parse_config
from penstock.errors import ConfigError

_SMALLEST: dict[str, Any] = {
    "model": {"path": "some/model"},
    "rollout": {"environment": {"kind": "reasoning_gym:chain_sum"}},
}
SMALLEST_YAML = """\
model: {path: some/model}
rollout:
  environment: {kind: "reasoning_gym:chain_sum"}
"""


def settings(**dotted: Any) -> dict[str, Any]:
    """The smallest settings with others set: `training__max_steps=3`."""
    data = copy.deepcopy(_SMALLEST)
    for key, value in dotted.items():
        *sections, name = key.split("__")
        section = data
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return data


def problems(**dotted: Any) -> list[str]:
    """The lines that these settings are rejected with."""
    with pytest.raises(ConfigError) as caught:
        parse_config(settings(**dotted))
    return caught.value.problems


def file_problems(path: Path, content: str | bytes, *overrides: str) -> list[str]:
    """The lines that a file with this content is rejected with."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems

"""`penstock verify` as a person or a program calls it, on the tiny configuration of this folder's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from tests.run.conftest import ConfigMaker


@dataclass(frozen=True)
class Verified:
    """What a program sees."""

    exit_code: int
    content: dict[str, Any]

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        """Rows by key."""
        rows: dict[str, dict[str, Any]] = self.content["checks"]
        return rows

    def with_status(self, status: str) -> list[str]:
        """Keys of the rows with this status."""
        return [key for key, row in self.checks.items() if row["status"] == status]

    def figures(self, key: str) -> dict[str, Any]:
        """A row's figures."""
        figures: dict[str, Any] = self.checks[key]["figures"]
        return figures


Verify = Callable[..., Verified]


def run_verify(config: RunConfig, folder: Path, *arguments: str) -> Verified:
    """`penstock verify --json` in this process."""
    path = folder / "verify.yaml"
    path.write_text(dump_config(config))
    done = CliRunner().invoke(app, ["verify", str(path), "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Verified(done.exit_code, json.loads(done.stdout))


@pytest.fixture
def verify(make_config: ConfigMaker, tmp_path: Path) -> Verify:
    """`verify("--groups", "2", **{"model.dtype": "float64"})`."""

    def call(*arguments: str, **changes: Any) -> Verified:
        return run_verify(make_config(**changes), tmp_path, *arguments)

    return call

"""Runs to check before they begin, and what is found wrong with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from penstock.run.checks import find_problems
from penstock.run.problems import Level
from tests.run.conftest import ConfigMaker


def found(config: Any, level: Level) -> dict[str, str]:
    """Reasons by key."""
    return {problem.key: problem.reason for problem in find_problems(config).all if problem.level is level}


def errors(config: Any) -> dict[str, str]:
    return found(config, Level.ERROR)


def warnings(config: Any) -> dict[str, str]:
    return found(config, Level.WARNING)


def prompts(path: Path, count: int, **columns: Any) -> str:
    path.write_text("".join(json.dumps({"prompt": f"go {i}", **columns}) + "\n" for i in range(count)))
    return str(path)


def function_run(make_config: ConfigMaker, tmp_path: Path, **changes: Any) -> Any:
    settings = {
        "data": {"train_path": prompts(tmp_path / "train.jsonl", 24)},
        "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:length"},
    }
    return make_config(**settings | changes)


def changed_model(model_folder: Path, tmp_path: Path, **settings: Any) -> Path:
    """A copy of the model whose `config.json` says otherwise."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder

"""What each command prints and calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
import yaml
from typer.testing import CliRunner, Result

import penstock
from penstock.cli.main import app
from penstock.config.models import RunConfig
from penstock.errors import ConfigError
from tests.cli.programs import SMALLEST_YAML


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST_YAML)
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Replace a module that a command imports when it is called."""
    replaced = ModuleType(module)
    vars(replaced).update(functions)
    monkeypatch.setitem(sys.modules, module, replaced)


@pytest.mark.parametrize(
    "command",
    [[], ["train"], ["eval"], ["config"], ["config", "show"], ["config", "check"], ["config", "schema"], ["doctor"]],
)
def test_help_is_short_and_has_an_example(command: list[str]) -> None:
    shown = invoke(*command, "--help")
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) <= 25
    assert " ".join(["  penstock", *command]) in shown.stdout.partition("Example:")[2]


def test_version() -> None:
    assert invoke("--version").stdout == f"penstock {penstock.__version__}\n"


class TestTrain:
    @pytest.fixture
    def trained(self, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
        configs: list[RunConfig] = []

        def train(config: RunConfig, *, from_scratch: bool, json_to: TextIO | None) -> SimpleNamespace:
            configs.append(config)
            if json_to is not None:
                json_to.write('{"type": "step", "step": 3}\n')
            summary = {
                "steps": 3,
                "train/reward_mean_end": 0.5,
                "eval/reward_mean": None,
                "best": float("nan"),
                "curve": [1, 2],
            }
            return SimpleNamespace(summary=summary, run_dir=Path("runs/x"), stopped_by="max_steps")

        stand_in(monkeypatch, "penstock.run.train", train=train)
        return configs

    def test_runs_with_overrides_and_prints_the_summary(self, config: str, trained: list[RunConfig]) -> None:
        shown = invoke("train", config, "seed=7")
        assert shown.exit_code == 0
        assert trained[0].seed == 7
        lines = [line.split() for line in shown.stdout.splitlines()]
        assert ["train/reward_mean_end", "0.5"] in lines
        assert ["eval/reward_mean", "-"] in lines
        assert not any("curve" in line for line in lines)

    @pytest.mark.parametrize("flags", [[], ["--from-scratch"]])
    @pytest.mark.parametrize("command", ["train", "resume"])
    def test_from_scratch_is_passed_on(
        self, config: str, monkeypatch: pytest.MonkeyPatch, command: str, flags: list[str]
    ) -> None:
        given: list[bool] = []

        def run(*_: object, from_scratch: bool, checkpoint: str | None = None, json_to: object) -> SimpleNamespace:
            given.append(from_scratch)
            return SimpleNamespace(summary={}, run_dir=Path("runs/x"), stopped_by="max_steps", nothing_left=None)

        stand_in(monkeypatch, "penstock.run.train", **{command: run})
        assert invoke(command, config, *flags).exit_code == 0
        assert given == [bool(flags)]

    def test_json_is_the_only_thing_on_stdout_and_valid(self, config: str, trained: list[RunConfig]) -> None:
        shown = invoke("train", config, "--json", "observe.console=table").stdout.splitlines()
        step, content = map(json.loads, shown)
        assert trained[0].observe.console == "table", "it is written to config.yaml, where it would outlive --json"
        assert step == {"type": "step", "step": 3}
        assert content["type"] == "result"
        assert content["run_dir"] == "runs/x"
        assert content["summary"] == {
            "steps": 3,
            "train/reward_mean_end": 0.5,
            "eval/reward_mean": None,
            "best": None,
            "curve": [1, 2],
        }

    def test_modules_of_the_current_folder_can_be_named_in_settings(
        self, config: str, trained: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path)
        invoke("train", config)
        assert sys.path[-1] == str(tmp_path)


EvalCall = tuple[RunConfig, Path | None, str | None]


class TestEval:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[EvalCall]:
        calls: list[EvalCall] = []

        def evaluate(config: RunConfig, run_dir: Path | None, checkpoint: str | None) -> dict[str, Any]:
            calls.append((config, run_dir, checkpoint))
            return {"reward_mean": 0.25, "pass@4": 0.5, "failures": []}

        stand_in(monkeypatch, "penstock.run.evaluate", evaluate=evaluate)
        return calls

    def test_settings_file(self, config: str, calls: list[EvalCall]) -> None:
        shown = invoke("eval", config, "data.eval_size=5")
        assert shown.stdout == "Evaluation\n  reward_mean  0.25\n  pass@4       0.5\n"
        assert calls[0][0].data.eval_size == 5
        assert calls[0][1:] == (None, None)

    def test_run_directory(self, tmp_path: Path, calls: list[EvalCall]) -> None:
        (tmp_path / "config.yaml").write_text(SMALLEST_YAML)
        shown = json.loads(invoke("eval", str(tmp_path), "--json").stdout)
        assert shown == {"reward_mean": 0.25, "pass@4": 0.5, "failures": []}
        assert calls[0][1:] == (tmp_path, None)

    def test_checkpoint_by_name(self, tmp_path: Path, calls: list[EvalCall]) -> None:
        (tmp_path / "config.yaml").write_text(SMALLEST_YAML)
        assert invoke("eval", str(tmp_path), "--checkpoint", "best").exit_code == 0
        assert calls[0][1:] == (tmp_path, "best")

    def test_a_settings_file_has_no_checkpoints_to_choose_from(self, config: str, calls: list[EvalCall]) -> None:
        shown = invoke("eval", config, "--checkpoint", "step_3")
        assert shown.exit_code == 2
        assert shown.stderr == f"error: {config}: is a settings file: --checkpoint needs the folder of a run\n"
        assert calls == []

    def test_folder_that_is_no_run(self, tmp_path: Path) -> None:
        shown = invoke("eval", str(tmp_path))
        assert shown.exit_code == 2
        assert shown.stderr == f"error: {tmp_path}: is not the folder of a run: it has no config.yaml\n"


class TestConfig:
    def test_show_is_the_resolved_configuration(self, config: str) -> None:
        shown = invoke("config", "show", config, "training.max_steps=9")
        data = yaml.safe_load(shown.stdout)
        assert data["training"]["max_steps"] == 9
        assert json.loads(invoke("config", "show", config, "--json").stdout)["staleness"] == {"policy": "on_policy"}

    def test_check_says_ok(self, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in(monkeypatch, "penstock.run.checks", check_config=lambda config: None)
        assert invoke("config", "check", config).stdout == f"{config}: OK\n"
        assert json.loads(invoke("config", "check", config, "--json").stdout) == {"ok": True}

    def test_check_looks_beyond_the_settings(self, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def too_small(_: RunConfig) -> None:
            raise ConfigError(["buffer.max_buffered_groups: 1 is too small; use at least 8"])

        stand_in(monkeypatch, "penstock.run.checks", check_config=too_small)
        shown = invoke("config", "check", config, "--json")
        assert shown.exit_code == 2
        assert "buffer.max_buffered_groups: 1 is too small" in shown.stderr
        assert json.loads(shown.stdout)["error"]["problems"] == [
            {"key": "buffer.max_buffered_groups", "reason": "1 is too small; use at least 8"}
        ]

    def test_schema_is_json(self) -> None:
        assert json.loads(invoke("config", "schema").stdout)["title"] == "RunConfig"

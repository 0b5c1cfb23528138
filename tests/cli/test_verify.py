"""`penstock verify`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.config.models import RunConfig
from penstock.errors import SetupError
from penstock.run.verify.findings import Check, CheckResult, Finding, SeenPrompt, Status, VerifyReport
from tests.cli.programs import SMALLEST_YAML

CHECK = Check("parity", "gradient parity", ("difference",), "It means this. Do that.")
SOUND = CheckResult(
    CHECK, Finding(Status.PASS, "1e-07 streamed", {"difference": 1e-7}, {"difference": 1e-5}, "at most 1e-5"), 1.2
)
BROKEN = CheckResult(CHECK, Finding(Status.FAIL, "0.3 streamed", {"difference": 0.3}, problem="Too much."), 0.5)
DUBIOUS = CheckResult(
    CHECK, Finding(Status.WARN, "0 of 8", {}, problem="Nothing to learn.", notes=("on 2 groups",)), 0.5
)
RAISED = CheckResult(CHECK, Finding(Status.FAIL, "error", {}, problem="The check ended with an error: no."), 0.1, "no")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST_YAML)
    return str(path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


class _Checks:
    """Stands in for the checks, and remembers how they were called."""

    def __init__(self, *rows: CheckResult, error: Exception | None = None) -> None:
        self.rows, self.error = rows, error
        self.prompt: SeenPrompt | None = None
        self.calls: list[tuple[RunConfig, Any]] = []

    def __call__(self, config: RunConfig, limits: Any, notify: Any) -> VerifyReport:
        self.calls.append((config, limits))
        notify("at work")
        if self.error is not None:
            raise self.error
        subject = {"model": config.model.path, "dtype": "float32", "device": "cpu"}
        return VerifyReport(subject, self.rows, 3.0, self.prompt)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(*rows: CheckResult, error: Exception | None = None) -> _Checks:
        checks = _Checks(*rows, error=error)
        module = ModuleType("penstock.run.verify.preflight")
        vars(module)["verify"] = checks
        monkeypatch.setitem(sys.modules, "penstock.run.verify.preflight", module)
        return checks

    return put


def test_a_table_with_figures_bars_and_seconds(config: str, stand_in: Any) -> None:
    stand_in(SOUND)
    shown = invoke(config)
    assert shown.exit_code == 0
    assert shown.stdout == (
        "some/model, float32, cpu\n"
        "  pass  gradient parity  1.2 s  1e-07 streamed; bar: at most 1e-5\n"
        "All checks passed. 3 s in total.\n"
    )


def test_the_first_prompt_is_shown_with_its_ids(config: str, stand_in: Any) -> None:
    checks = stand_in(SOUND)
    checks.prompt = SeenPrompt("<|user|>2+2?\n<|assistant|>\x1b[2J", (7, 1, 8))
    assert invoke(config).stdout.splitlines()[2:-1] == [
        "First prompt as the model sees it (3 tokens)",
        "  <|user|>2+2?",
        "  <|assistant|>\\x1b[2J",
        "  ids: 7 1 8",
    ]
    assert json.loads(invoke(config, "--json").stdout)["prompt"] == {
        "text": "<|user|>2+2?\n<|assistant|>\x1b[2J",
        "token_ids": [7, 1, 8],
    }


def test_of_a_long_prompt_the_beginning_and_the_end_are_shown(config: str, stand_in: Any) -> None:
    checks = stand_in(SOUND)
    checks.prompt = SeenPrompt("begin " + 5000 * "x" + " end", tuple(range(1000)))
    shown = invoke(config).stdout
    assert "  begin xxx" in shown
    assert "xxx end\n" in shown
    assert "\n  … 3,810 characters …\n" in shown
    assert "  ids: 0 1 2" in shown
    assert " 15 … 984 " in shown


def test_a_failed_bar_says_what_it_means_and_what_to_do(config: str, stand_in: Any) -> None:
    stand_in(SOUND, BROKEN)
    shown = invoke(config)
    assert shown.exit_code == 1
    assert "  fail  gradient parity  0.5 s  0.3 streamed\n" in shown.stdout
    assert "gradient parity\n  Too much. It means this. Do that.\n" in shown.stdout
    assert shown.stdout.endswith("Failed: gradient parity. 3 s in total.\n")


def test_a_warning_is_explained_and_does_not_fail(config: str, stand_in: Any) -> None:
    stand_in(SOUND, DUBIOUS)
    shown = invoke(config)
    assert shown.exit_code == 0
    assert "  Nothing to learn. It means this. Do that.\n  on 2 groups\n" in shown.stdout
    assert shown.stdout.endswith("All checks passed. Warnings: gradient parity. 3 s in total.\n")


def test_a_check_that_raised_does_not_claim_to_know_what_that_means(config: str, stand_in: Any) -> None:
    stand_in(RAISED)
    shown = invoke(config)
    assert shown.exit_code == 1
    assert "It means this" not in shown.stdout
    assert "The check ended with an error: no." in shown.stdout


@pytest.mark.parametrize(("row", "code"), [(SOUND, 0), (BROKEN, 1)])
def test_json_is_all_of_stdout(config: str, stand_in: Any, row: CheckResult, code: int) -> None:
    stand_in(row)
    shown = invoke(config, "--json")
    assert shown.exit_code == code
    content = json.loads(shown.stdout)
    assert content["ok"] is (code == 0)
    assert content["subject"] == {"model": "some/model", "dtype": "float32", "device": "cpu"}
    assert content["checks"]["parity"]["figures"] == dict(row.finding.figures)
    assert content["checks"]["parity"]["status"] == row.finding.status.value


def test_overrides_and_limits_reach_the_checks(config: str, stand_in: Any) -> None:
    checks = stand_in(SOUND)
    invoke(config, "seed=7", "--groups", "3", "--seconds", "20")
    settings, limits = checks.calls[0]
    assert (settings.seed, limits.groups, limits.seconds) == (7, 3, 20.0)


def test_wrong_settings_are_2(config: str) -> None:
    shown = invoke(config, "seeed=1", "--json")
    assert shown.exit_code == 2
    assert json.loads(shown.stdout)["error"]["problems"][0]["key"] == "seeed"


def test_a_run_that_cannot_be_built_is_2(config: str, stand_in: Any) -> None:
    stand_in(error=SetupError("some/model is not a model"))
    shown = invoke(config)
    assert (shown.exit_code, shown.stderr) == (2, "error: cannot start: some/model is not a model\n")


def test_help_is_short_and_has_an_example() -> None:
    shown = invoke("--help")
    assert len(shown.stdout.splitlines()) <= 27
    assert "penstock verify run.yaml" in shown.stdout.partition("Example:")[2]

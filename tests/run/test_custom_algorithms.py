"""The example of docs/algorithms.md, from its page to a trained model; and what a resumed run may not change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError, PenstockError
from penstock.run.checks import check_config
from penstock.run.resume_rules import changes
from penstock.run.train import train
from tests.run.conftest import ConfigMaker

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
SUPPORT = "tests.support.custom_algorithms"
SOURCE = (Path(__file__).parents[1] / "support" / "custom_algorithms.py").read_text()
LUCK = {"loss": "no luck", "advantage": "no luck either"}


def example() -> tuple[str, dict[str, Any]]:
    """The module that the page shows, and its settings."""
    (module,) = re.findall(r"^```python\n# my_algorithms.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    recipe = PAGE.partition("**Your own loss and advantage**")[2].partition("```yaml\n")[2].partition("```")[0]
    return module, parse_yaml(recipe)["algorithm"]


def rows_of(run_dir: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def test_the_example_of_the_page_trains(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, settings = example()
    (tmp_path / "my_algorithms.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    config = make_config(**{"algorithm": {**settings, "old_policy": "engine"}, "training.max_steps": 2})
    check_config(config)
    train(config)
    steps = [row for row in rows_of(config.run_dir) if "train/loss" in row]
    assert len(steps) == 2
    assert all("train/loss/bent" in row and row["train/grad_norm"] > 0 for row in steps)


def test_an_advantage_that_is_not_finite_ends_the_run_with_its_name(make_config: ConfigMaker) -> None:
    path = f"{SUPPORT}:not_finite"
    config = make_config(**{"algorithm.advantage": {"kind": "custom", "import_path": path}})
    with pytest.raises(PenstockError, match=f"the advantage {path} gave nan"):
        train(config)


@pytest.mark.parametrize("section", ["loss", "advantage"])
def test_code_that_raises_ends_the_run_with_its_line(
    make_config: ConfigMaker, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    name = {"loss": "raising", "advantage": "raising_advantage"}[section]
    settings = {f"algorithm.{section}": {"kind": "custom", "import_path": f"{SUPPORT}:{name}"}}
    config = make_config(**settings, **{"observe.console": "plain", "training.train_attempts": 3})
    line = next(
        i
        for i, text in enumerate(SOURCE.splitlines(), start=1)
        if text == f'    raise ZeroDivisionError("{LUCK[section]}")'
    )
    where = f"ZeroDivisionError: {LUCK[section]} (custom_algorithms.py, line {line}, in {name})"
    with pytest.raises(PenstockError, match=re.escape(where)):
        train(config)
    events = [json.loads(text) for text in (Path(config.run_dir) / "events.jsonl").read_text().splitlines()]
    [failed] = [event for event in events if event["event"] == "run_failed"]
    assert failed["traceback"].count("  File ") == 1
    assert f'custom_algorithms.py", line {line}, in {name}' in failed["traceback"]
    assert not [event for event in events if event["event"] == "step_replayed"], "it would fail again"
    assert f'custom_algorithms.py", line {line}, in {name}' in capsys.readouterr().out
    page = (Path(config.run_dir) / "report.html").read_text(encoding="utf-8")
    assert "What ended the run" in page
    assert f"line {line}, in {name}" in page.partition("What ended the run")[2]


@pytest.mark.parametrize("section", ["loss", "advantage"])
def test_a_path_that_leads_nowhere_is_found_before_the_run(make_config: ConfigMaker, section: str) -> None:
    config = make_config(**{f"algorithm.{section}": {"kind": "custom", "import_path": f"{SUPPORT}:nothing"}})
    with pytest.raises(ConfigError, match=rf"algorithm\.{section}\.import_path: module .* has no function or class"):
        check_config(config)


@pytest.mark.parametrize(("section", "other"), [("loss", "RowMean"), ("advantage", "group_count")])
def test_the_import_path_is_fixed_and_the_args_are_not(make_config: ConfigMaker, section: str, other: str) -> None:
    def config(name: str, **args: Any) -> Any:
        return make_config(
            **{f"algorithm.{section}": {"kind": "custom", "import_path": f"{SUPPORT}:{name}", "args": args}}
        )

    (change,) = changes(config("clipped"), config(other))
    assert (change.key, change.is_fixed) == (f"algorithm.{section}.import_path", True)
    (change,) = changes(config("clipped"), config("clipped", clip=0.3))
    assert (change.key, change.is_fixed) == (f"algorithm.{section}.args", False)

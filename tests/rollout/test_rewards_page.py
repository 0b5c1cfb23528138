"""The reward functions of the page are saved, named and called as it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.rollout.environments import Split
from penstock.rollout.environments.factory import make_environment
from tests.rollout.talking import Talker
from tests.test_docs import blocks

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Python finds the page's module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def section(page: str, heading: str) -> tuple[str, list[dict[str, Any]]]:
    """The Python of a section of the second level, and the environments of its settings."""
    text = (DOCS / page).read_text(encoding="utf-8")
    part = text[text.index(heading) :].split("\n## ", 1)[0]
    code = "\n".join(block.code for block in blocks(part) if block.info == "python")
    settings = [parse_yaml(block.code) for block in blocks(part) if block.info == "yaml"]
    return code, settings


def made(folder: Path, code: str, settings: dict[str, Any], record: dict[str, Any]) -> Any:
    (folder / "my_rewards.py").write_text(code, encoding="utf-8")
    (folder / "d.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    data = {key: value for key, value in settings["data"].items() if key == "answer_key"}
    config = EnvironmentConfig.model_validate(settings["rollout"]["environment"] | {"workers": 1})
    return make_environment(config, DataConfig(train_path=str(folder / "d.jsonl"), **data), seed=0)


async def group(environment: Any, *responses: str) -> list[Any]:
    [prompt] = environment.prompts(Split.TRAIN)
    handles = [Talker(lambda text, said=said: said).handle() for said in responses]
    if hasattr(environment, "run_group"):
        found = await environment.run_group(prompt, handles)
    else:
        found = [await environment.run(prompt, handle) for handle in handles]
    await environment.close()
    return list(found)


async def test_functions_of_the_page_on_environments(folder: Path) -> None:
    code, (single, several) = section("environments.md", "## `function`")
    record = {"prompt": "2+3?", "answer": "5", "difficulty": 2}
    [right] = await group(made(folder, code, single, record), "5")
    assert right.reward == 1.5
    first, second, _ = await group(made(folder, code, several, record), "<answer>5</answer>", "5", "5")
    assert first.reward == pytest.approx(0.2 * 1.1 + 0.1)
    assert set(first.components) == {"exact_match", "format", "format/tags", "format/characters", "diverse"}
    assert second.reward == pytest.approx(1.0 + 0.1 * 0.5)


async def test_functions_for_trl_and_verl_on_the_page_for_those_who_come_from_them(folder: Path) -> None:
    code, (trl, verl) = section("coming-from.md", "## Reward functions")
    first, second = await group(made(folder, code, trl, {"prompt": "2+3?", "solution": "5"}), "It is 5.", "6" * 300)
    assert (first.reward, second.reward) == pytest.approx((1.2, 0.0))
    record = {"prompt": "2+3?", "reward_model": {"ground_truth": "5"}, "data_source": "gsm8k", "extra_info": {}}
    [right] = await group(made(folder, code, verl, record), "5")
    assert (right.reward, right.components) == (1.0, {"length": 1.0})

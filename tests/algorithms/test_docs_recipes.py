"""docs/algorithms.md is true: its recipes are valid, what it calls refused is refused, and no option is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from penstock.config.reading.loading import parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.config.sections.algorithm import AdvantageConfig, AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from penstock.errors import ConfigError
from tests.config.settings import settings

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
_RECIPE = re.compile(r"^\*\*(?P<name>[^*]+)\*\*.*?^```yaml\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
RECIPES = {match["name"]: match["body"] for match in _RECIPE.finditer(PAGE.partition("## Recipes")[2])}
REFUSED = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## What is refused")[2], re.MULTILINE)


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def parse(text: str) -> AlgorithmConfig:
    return parse_config(merged(settings(), parse_yaml(text))).algorithm


def kinds(union: Any) -> list[str]:
    options = get_args(get_args(union)[0])
    return [option.model_fields["kind"].default for option in options]


def test_every_block_of_settings_is_a_recipe() -> None:
    assert len(RECIPES) == PAGE.count("```yaml")
    wanted = "GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++, Plain REINFORCE, Decoupled PPO"
    assert set(wanted.split(", ")) <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid(name: str) -> None:
    parse(RECIPES[name])


@pytest.mark.parametrize(
    ("name", "advantage", "loss"),
    [
        ("GRPO", "grpo", "ppo_clip"),
        ("GSPO", "grpo", "gspo"),
        ("CISPO", "grpo", "cispo"),
        ("RLOO", "rloo", "reinforce"),
        ("REINFORCE++", "reinforce_pp", "ppo_clip"),
        ("Plain REINFORCE", "reward", "reinforce"),
    ],
)
def test_a_recipe_stands_under_its_name(name: str, advantage: str, loss: str) -> None:
    algorithm = parse(RECIPES[name])
    assert (algorithm.advantage.kind, algorithm.loss.kind) == (advantage, loss)


@pytest.mark.parametrize("text", REFUSED)
def test_what_the_page_calls_refused_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("{" + text + "}")
    (problem,) = caught.value.problems
    assert "unknown" not in problem


def test_the_list_of_refusals_is_found() -> None:
    assert len(REFUSED) > 10


@pytest.mark.parametrize("kind", [*kinds(AdvantageConfig), *kinds(LossConfig), *kinds(CorrectionConfig)])
def test_every_kind_has_a_row(kind: str) -> None:
    assert re.search(rf"^\| `{kind}` \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize("section", [AlgorithmConfig, KlConfig], ids=["algorithm", "kl"])
def test_every_setting_is_named(section: type[BaseModel]) -> None:
    assert [name for name in section.model_fields if name not in PAGE] == []

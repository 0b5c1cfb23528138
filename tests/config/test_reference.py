"""The page of settings says what the models say."""

from __future__ import annotations

from pathlib import Path

from penstock.config.models import RunConfig
from penstock.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    hint = "run: .venv/bin/python -m penstock.config.reference > docs/settings.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), hint


def test_every_setting_has_a_meaning() -> None:
    assert not [line for line in reference().splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_sections_of_every_kind_are_there() -> None:
    text = reference()
    for name in RunConfig.model_fields:
        assert f"`{name}`" in text
    for kind in ("on_policy", "windowed", "in_order", "weight_fifo", "ready_first", "custom"):
        assert f"`policy: {kind}`" in text
    for kind in ("none", "tis", "ppo_clip", "gspo", "grpo"):
        assert f"`kind: {kind}`" in text

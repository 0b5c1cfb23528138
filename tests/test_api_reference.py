"""The page of public names says what the docstrings say, and leaves nothing out."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.api_reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
NAMES = [name for name in penstock.__all__ if name != "__version__"]


def test_the_page_is_current() -> None:
    hint = "run: .venv/bin/python -m penstock.api_reference > docs/api.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), hint


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_with_a_purpose_of_its_own(name: str) -> None:
    thing = getattr(penstock, name)
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert own, f"{name} has no docstring"
    assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"
    entry = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", reference(), re.MULTILINE | re.DOTALL)
    assert entry is not None
    assert own.strip().splitlines()[0] in entry[1]


def test_functions_have_their_signature() -> None:
    text = reference()
    assert "train(\n    config: " in text
    assert ") -> RunResult\n" in text
    assert "EmbeddedEngine.from_pretrained(\n    model: str | ModelConfig," in text
    assert "`await train_microbatch(step_id: int, meta: KVBatchMeta) -> ChunkResult`: " in text


def test_all_names_are_offered_and_none_is_imported_before_it_is_used() -> None:
    assert set(NAMES) <= set(dir(penstock))
    code = "import penstock, sys; dir(penstock); assert not {'torch', 'pydantic', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_class_in_a_public_signature_is_public_or_explained() -> None:
    text = reference()
    for alias in ("Settings", "Rewards", "MakesEnvironment", "MakesSampler"):
        assert f"`{alias}` " in text.split("### ")[0], alias
    used = {"Logger", "RunInfo", "Outcome", "Done", "Observation", "Split", "LossTokens", "SampleScores"}
    assert used <= set(NAMES)

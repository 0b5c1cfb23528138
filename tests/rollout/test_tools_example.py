"""The tools example: its settings are valid, and its tokenizer and conversations fit the calculator."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.rollout.environments import Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.handle import HFTokenizer
from tests.rollout.talking import Talker

FOLDER = Path(__file__).parents[2] / "examples" / "tools"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("warm_start")


async def test_a_model_that_does_what_the_warm_start_teaches_is_rewarded(example: Any) -> None:
    config = penstock.load_config(FOLDER / "config.yaml")
    environment: Any = make_environment(config.rollout.environment, config.data, seed=config.seed)
    tokens = HFTokenizer(example.make_tokenizer(), chat_template=False)
    prompt = environment.prompts(Split.TRAIN)[0]
    _, (asked, own), (result, shown), (answer, last) = example.with_calculator(prompt)
    assert (own, shown, last) == (True, False, True)
    talker = Talker(lambda text: answer if text.endswith("</result>") else asked, tokens)
    trajectory = await environment.run(prompt, talker.handle())
    assert trajectory.reward == 1.0
    assert tokens.decode(trajectory.segments[2].token_ids) == result
    ends = {tokens.encode(tag)[0] for tag in ("</calc>", "</answer>")}
    assert ends < talker.requests[0].sampling.stop_token_ids
    assert 2 not in tokens.encode(
        "".join(text for text, _ in example.at_once(prompt)) + "<result>error: too long</result>"
    )

"""The page's environment of 30 lines works as it stands: it is saved, named, trained on, and its rows are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.reading.loading import parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.rollout.engines.base import SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.environments import Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.handle import HFTokenizer
from penstock.rollout.manager import PARTITION, RolloutManager, RolloutSettings
from penstock.rollout.prompts import PromptVisit
from tests.support.tiny_models import char_tokenizer, save_tiny_model, tiny_model
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
HEADING = "## Write an environment in 30 lines"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """The code and the settings of the page; the code saved where Python finds it."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(HEADING) :].split("\n## ", 2)[0]
    code, settings = (next(b.code for b in blocks(section) if b.info == info) for info in ("python", "yaml"))
    (tmp_path / "my_environments.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_environments", raising=False)
    return code, parse_yaml(settings)


def digits(tokenizer: Any) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]


def test_the_page_keeps_its_word(page: tuple[str, dict[str, Any]]) -> None:
    lines = [line for line in page[0].splitlines() if line.strip()]
    assert len(lines) <= 30


def test_a_run_trains_on_it(page: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    settings = page[1]
    settings["run_dir"] = str(tmp_path / "run")
    settings["model"]["path"] = str(save_tiny_model(tmp_path / "model"))
    settings["data"] |= {"train_size": 8, "eval_size": 4}
    settings["rollout"] |= {
        "group_size": 3,
        # A random model seldom stops: a digit ends its turn.
        "sampling": {"max_new_tokens": 24, "stop_token_ids": digits(char_tokenizer())},
        "engine": {"max_num_seqs": 12, "max_model_len": 192},
    }
    settings["training"] = {"prompt_groups_per_step": 4, "max_steps": 2}
    settings["runtime"] = {"device": "cpu", "engine_threads": 1, "trainer_threads": 1}
    settings["observe"] = {"console": "off"}
    summary = penstock.train(parse_config(settings)).summary
    assert summary["steps"] == 2
    assert -1.0 <= summary["eval/reward_mean"] <= 1.0


async def test_its_rows_hold_the_game(page: tuple[str, dict[str, Any]]) -> None:
    config = EnvironmentConfig(**page[1]["rollout"]["environment"])
    environment = make_environment(config, DataConfig(train_size=6, eval_size=2), seed=0)
    hf = char_tokenizer()
    engine = EmbeddedEngine(tiny_model(vocabulary=len(hf)), max_num_seqs=24, max_model_len=192, threads=1)
    plane = MemoryDataPlane()
    plane.register_partition(PARTITION, fields.schema(*fields.ROLLOUT_FIELDS))
    sampling = SamplingParams(24, stop_token_ids=frozenset({1, *digits(hf)}))
    settings = RolloutSettings(4, sampling, seed=0, generation_timeout_seconds=30)
    manager = RolloutManager(engine, environment, HFTokenizer(hf, chat_template=False), plane, settings)
    seen = set()
    for prompt in environment.prompts(Split.TRAIN):
        pushed = await manager.generate_and_push(PromptVisit(0, prompt), prompt.prompt_id, 0)
        batch = plane.get_samples(pushed.meta, fields.ROLLOUT_FIELDS)
        for row in range(4):
            ids, mask, logprobs, versions = (
                batch.jagged(name).row(row).tolist()
                for name in (fields.INPUT_IDS, fields.TOKEN_MASK, fields.GENERATION_LOGPROBS, fields.TOKEN_VERSIONS)
            )
            spans = runs_of(ids, mask)
            turns = [hf.decode(span, skip_special_tokens=True) for kept, span in spans if kept]
            replies = [hf.decode(span) for kept, span in spans if not kept][1:]
            assert hf.decode(spans[0][1]) == prompt.text
            assert set(replies) <= {" higher: ", " lower: "}
            assert float(batch.tensor(fields.REWARD)[row]) == pytest.approx(expected_reward(turns, prompt.answer))
            assert [version == 0 for version in versions] == [bool(kept) for kept in mask]
            assert all(
                (logprob < 0.0) if kept else logprob == 0.0 for kept, logprob in zip(mask, logprobs, strict=True)
            )
            seen.add(len(turns))
    assert len(seen) > 1, "games of one length only show nothing of turns"
    await environment.close()
    await engine.close()


def runs_of(ids: list[int], mask: list[float]) -> list[tuple[bool, list[int]]]:
    """Neighbouring tokens of one kind together."""
    spans: list[tuple[bool, list[int]]] = []
    for token, kept in zip(ids, mask, strict=True):
        if not spans or spans[-1][0] != bool(kept):
            spans.append((bool(kept), []))
        spans[-1][1].append(token)
    return spans


def expected_reward(turns: list[str], number: int) -> float:
    """The rules of the game, told again."""
    last = re.findall(r"\d+", turns[-1])
    if not last:
        return -1.0
    return 1.0 / len(turns) if int(last[-1]) == number else 0.0

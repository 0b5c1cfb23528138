"""Whole runs on environments that need more than a function: processes, servers, chats."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.reading.loading import parse_config
from penstock.rollout.environments import Done, MultiTurnEnvironment, Prompt, SingleTurnEnvironment, Split
from penstock.run.checks import check_config
from tests.rollout.talking import CHAT
from tests.support.tiny_models import char_tokenizer, save_tiny_model


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(folder)},
        "rollout": {
            "group_size": 2,
            "sampling": {"max_new_tokens": 6},
            "engine": {"max_num_seqs": 8, "max_model_len": 160},
            "failure": {"backoff_seconds": 0},
        },
        "training": {"prompt_groups_per_step": 2, "max_steps": 2},
        "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1},
        "observe": {"console": "off"},
    }


def own_processes(word: str) -> list[str]:
    """Children of this process with that word in their command."""
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[0] == str(os.getpid()) and word in line]


def test_math_over_chats_in_parquet(settings: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"chat": [{"role": "user", "content": f"{n}+{n}?"}], "solution": str(2 * n)} for n in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    path = str(tmp_path / "d.parquet")
    settings["data"] = {
        "train_path": path,
        "eval_path": path,
        "prompt_key": "chat",
        "answer_key": "solution",
        "chat_template": True,
    }
    settings["rollout"]["environment"] = {"kind": "math", "workers": 1, "args": {"unparsed": -1}}
    summary = penstock.train(parse_config(settings)).summary
    assert summary["steps"] == 2
    assert -1 <= summary["eval/reward_mean"] <= 1
    assert own_processes("reward_worker") == []


def test_a_verifiers_environment(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tasksets"))
    settings["data"] = {"chat_template": True, "eval_size": 1}
    settings["rollout"]["environment"] = {"kind": "verifiers:penstock-guess", "args": {"player": {"max_turns": 2}}}
    settings["data"]["epochs"] = 2
    result = penstock.train(parse_config(settings))
    assert result.summary["steps"] == 2
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [line["train/reward_mean"] for line in lines if "train/reward_mean" in line]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)


class Cancelling(MultiTurnEnvironment):
    """Raises for one held-out prompt what asyncio raises when a run is interrupted; counts how often it is closed."""

    closed = 0

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split.value}-{n}", "go") for n in range(4)]

    async def step(self, prompt: Prompt, turns: Any) -> Done:
        if prompt.prompt_id == "eval-1":
            raise asyncio.CancelledError
        return Done(1.0)

    async def close(self) -> None:
        type(self).closed += 1


def test_a_cancellation_inside_an_environment_is_no_interruption_of_the_run(settings: dict[str, Any]) -> None:
    path = f"{__name__}:Cancelling"
    settings["rollout"]["environment"] = {"kind": "custom", "import_path": path}
    settings["training"]["max_steps"] = 1
    result = penstock.train(parse_config(settings))
    assert result.stopped_by != "interrupted"
    assert (result.summary["steps"], result.summary["eval/reward_mean"]) == (1, 1.0)


class ScoresHere(SingleTurnEnvironment):
    """Its score is a method, which no other process has."""

    name = "here"

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split.value}-{n}", "go") for n in range(4)]

    def score(self, prompt: Prompt, response: str) -> float:
        return float(len(response))


def test_a_run_says_which_reward_stays_in_its_process(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings["rollout"]["environment"] = {"kind": "custom", "import_path": f"{__name__}:ScoresHere"}
    settings["training"]["max_steps"] = 1
    settings["observe"]["console"] = "plain"
    result = penstock.train(parse_config(settings))
    lines = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    [event] = [line for line in lines if line["event"] == "reward_in_process"]
    assert event["function"] == f"{__name__}:ScoresHere.score"
    assert "imported by a name" in event["reason"]
    assert f"({event['function']}, {event['reason']})" in capsys.readouterr().out


def test_the_check_of_a_configuration_closes_the_environment_that_it_makes(settings: dict[str, Any]) -> None:
    settings["rollout"]["environment"] = {"kind": "custom", "import_path": f"{__name__}:Cancelling"}
    before = Cancelling.closed
    check_config(parse_config(settings))
    assert Cancelling.closed == before + 1

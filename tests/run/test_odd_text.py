"""Text that no file takes, wherever it comes from: the run trains, saves, goes on and reports as with any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from penstock.errors import SetupError, TooManyDrops
from penstock.observe.report.build import write_report
from penstock.run.evaluate import evaluate
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines, steps

ODD = "\ud800\0\x1b[31m"


def odd_dataset(path: Path, count: int = 16) -> str:
    """Records that are odd in every part, as JSON spells them; the last is never dispatched in two steps of four."""
    records = [
        {"id": f"{ODD}{i}", "prompt": f"{i}+{i}={ODD}", "answer": {ODD: [ODD]}, ODD: f"a fact {ODD}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def assert_everything_can_be_read(run_dir: Path) -> None:
    """No file holds a surrogate, spelt out or escaped."""
    for path in run_dir.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".html"):
            assert "\\ud800" not in path.read_text(encoding="utf-8"), path


def test_a_run_over_odd_records_trains_saves_goes_on_and_reports(
    make_config: ConfigMaker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        **{
            "data": {
                "train_path": odd_dataset(tmp_path / "odd.jsonl"),
                "eval_path": odd_dataset(tmp_path / "e.jsonl", 2),
            },
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:letters"},
            "rollout.record": True,
            "training.max_steps": 2,
            "checkpoint.every_steps": 1,
            "observe": {"console": "plain", "samples_per_step": 2},
        }
    )
    result = penstock.train(config)
    assert result.summary["steps"] == 2
    said = capfd.readouterr().out
    assert said.count("18 prompts have text that is not Unicode") == 1
    assert penstock.resume(result.run_dir, ["training.max_steps=3"]).summary["steps"] == 3
    assert [line["step"] for line in steps(result.run_dir)] == [1, 2, 3]
    ids = [line["prompt_id"] for line in lines(result.run_dir / "ledger.jsonl")]
    assert len(set(ids)) == len(ids) == 12
    assert all(name.startswith("\ufffd\0\x1b[31m") for name in ids)
    assert write_report(result.run_dir).size > 0
    assert evaluate(config, result.run_dir)["eval/responses"] > 0
    assert_everything_can_be_read(result.run_dir)
    replayed = make_config(
        **{
            "run_dir": str(tmp_path / "again"),
            "rollout.replay_from": str(result.run_dir),
            "eval": {"at_start": False, "at_end": False},
        }
    )
    assert penstock.train(replayed).summary["steps"] == 3


def test_an_environment_that_says_odd_things_everywhere(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "data": {},
            "rollout.environment": {"kind": "custom", "import_path": "tests.support.odd_environment:OddEnvironment"},
            "rollout.failure.max_dropped_prompts": 1,
            "rollout.sampling.max_new_tokens": 4,
            "checkpoint.every_steps": 1,
            "training.max_steps": None,
            "staleness": {"policy": "windowed", "max_staleness": 2},
            "observe.samples_per_step": 2,
        }
    )
    result = penstock.train(config)
    [dropped] = [line for line in lines(result.run_dir / "events.jsonl") if line["event"] == "prompt_dropped"]
    assert dropped["prompt_id"] == "\ufffd\0\x1b[31m\u202810"
    assert "ValueError: \ufffd\0" in dropped["reason"]
    assert len(dropped["reason"]) < 9_000
    assert penstock.resume(result.run_dir).summary["steps"] == result.summary["steps"]
    assert (result.run_dir / "report.html").stat().st_size > 0
    assert_everything_can_be_read(result.run_dir)


def test_a_reward_that_raises_with_megabytes_leaves_kilobytes(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["fine"] * 4 + ["fail"] + ["fine"] * 3
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    config = make_config(
        **{
            "data": {"train_path": str(path)},
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:shouting"},
            "observe.trace": True,
        }
    )
    with pytest.raises(TooManyDrops) as caught:
        penstock.train(config)
    assert len(str(caught.value)) < 10_000
    assert "more characters" in str(caught.value)
    run_dir = Path(config.run_dir)
    assert sum(path.stat().st_size for path in run_dir.glob("*.json*")) < 500_000
    assert_everything_can_be_read(run_dir)


def test_ids_that_become_equal_are_refused_like_others(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"prompt": "a", "id": "\\ud800"}\n{"prompt": "b", "id": "\\udfff"}\n', encoding="utf-8")
    config = make_config(
        **{
            "data": {"train_path": str(path)},
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:letters"},
        }
    )
    with pytest.raises(SetupError, match=r"twice\.jsonl:1 and .*twice\.jsonl:2 have the same id"):
        penstock.train(config)

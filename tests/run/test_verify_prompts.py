"""What `penstock verify` says of the prompts, and of rewards that are all alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.run.verifying import Verify, verify

__all__ = ["verify"]


def data(tmp_path: Path, records: list[dict[str, Any]], reward: str = "length", **settings: Any) -> dict[str, Any]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "rollout.environment": {"kind": "function", "import_path": f"tests.support.rewards:{reward}"},
        "data": {"train_path": str(path), "shuffle": False, **settings},
    }


@pytest.mark.parametrize(("mode", "status"), [("error", "fail"), ("drop", "warn"), ("truncate_left", "warn")])
def test_prompts_that_are_too_long_are_counted(verify: Verify, tmp_path: Path, mode: str, status: str) -> None:
    records = [{"prompt": f"go {i}"} for i in range(6)] + [{"prompt": "x" * 96}, {"prompt": "y" * 200}]
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps({"prompt": "z" * 100}) + "\n" + json.dumps({"prompt": "z" * 92}) + "\n")
    settings = data(tmp_path, records, overlong=mode, eval_path=str(held_out))
    verified = verify("--groups", "2", **settings)
    row = verified.checks["prompts"]
    assert row["status"] == status
    assert row["figures"] == {
        "train_prompts": 8,
        "train_overlong": 2,
        "train_longest": 200,
        "cramped": 1,
        "eval_prompts": 2,
        "eval_overlong": 1,
        "eval_longest": 100,
        "empty_answers": 0,
        "repeated": 0,
    }
    assert "1 prompt leaves less room than" in row["explanation"]
    assert f"3 of 10 prompts leave no room for a response (data.overlong: {mode})." in row["explanation"]
    assert verified.exit_code == (1 if mode == "error" else 0)


def test_empty_answers_and_repeated_prompts_are_told(verify: Verify, tmp_path: Path) -> None:
    records = [{"prompt": f"go {i % 5}", "answer": "" if i == 3 else "x"} for i in range(6)]
    row = verify("--groups", "2", **data(tmp_path, records)).checks["prompts"]
    assert (row["status"], row["figures"]["empty_answers"], row["figures"]["repeated"]) == ("warn", 1, 1)
    assert "1 prompt has an empty answer" in row["explanation"]
    assert row["notes"] == ["1 training prompt is a duplicate"]


def test_a_reward_that_is_always_the_same_is_told(verify: Verify, tmp_path: Path) -> None:
    records = [{"prompt": f"go {i}"} for i in range(6)]
    for reward, alike in (("constant", True), ("length", False)):
        row = verify("--groups", "2", **data(tmp_path, records, reward)).checks["rewards"]
        assert row["figures"]["all_alike"] is alike
        assert row["status"] == ("warn" if alike else "pass")
        assert ("a reward that never changes teaches nothing" in (row["explanation"] or "")) is alike

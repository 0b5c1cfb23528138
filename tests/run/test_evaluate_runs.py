"""Whole runs that are evaluated on the way: what they write, when they stop, and what `penstock eval` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError, SetupError
from penstock.run import build_engines
from penstock.run.evaluate import evaluate
from penstock.run.train import resume
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines, steps

SAMPLED = {"greedy": False, "samples_per_prompt": 3, "pass_at": [1, 3], "pass_reward": 0.01}
LEAST = -1.0
"""A reward that every response has."""


def evals(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "metrics.jsonl") if "eval/reward_mean" in line]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "events.jsonl") if line["event"] == name]


class TestBetweenSteps:
    def test_an_evaluation_has_a_line_of_its_own_behind_its_steps_line(
        self, make_config: ConfigMaker, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = make_config(
            **{"eval": {"every_steps": 2, **SAMPLED}, "training.max_steps": 5, "observe.console": "plain"}
        )
        result = penstock.train(config)
        found = evals(result.run_dir)
        assert [line["step"] for line in found] == [0, 2, 4, 5]
        assert [line["eval/version"] for line in found] == [0, 2, 4, 5]
        assert all(line["eval/responses"] == 18 and line["timing/eval_s"] > 0 for line in found)
        assert all(0 <= line["eval/pass@1"] <= line["eval/pass@3"] <= 1 for line in found)
        order = [(line["step"], "train/loss" in line) for line in lines(result.run_dir / "metrics.jsonl")]
        assert order == sorted(order, key=lambda entry: (entry[0], not entry[1]))
        assert len(order) == 5 + 4
        summary = result.summary
        assert (summary["eval/reward_mean_start"], summary["eval/reward_mean"]) == (
            found[0]["eval/reward_mean"],
            found[-1]["eval/reward_mean"],
        )
        assert (summary["eval/step"], summary["eval/pass@3"]) == (5, found[-1]["eval/pass@3"])
        shown = capsys.readouterr().out.splitlines()
        step_3 = next(line for line in shown if line.startswith("step 3/5"))
        assert f"eval {found[1]['eval/reward_mean']:.2f}" in step_3
        assert "Held-out prompts" in (result.run_dir / "report.html").read_text(encoding="utf-8")

    @pytest.mark.long
    def test_the_last_step_is_not_evaluated_twice(self, make_config: ConfigMaker) -> None:
        result = penstock.train(make_config(**{"eval.every_steps": 2, "training.max_steps": 4}))
        assert [line["step"] for line in evals(result.run_dir)] == [0, 2, 4]
        assert result.summary["eval/step"] == 4

    @pytest.mark.long
    def test_evaluations_change_no_bit_of_a_deterministic_run(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        def losses(name: str, **evaluation: Any) -> list[tuple[float, float]]:
            config = make_config(
                **{
                    "run_dir": str(tmp_path / name),
                    "deterministic": True,
                    "staleness": {"policy": "in_order", "lookahead": 0},
                    "weight_sync.mode": "drain",
                    "training.min_groups_per_chunk": 2,
                    "eval": {"at_start": False, "at_end": False, **evaluation},
                }
            )
            return [(line["train/loss"], line["train/reward_mean"]) for line in steps(penstock.train(config).run_dir)]

        assert losses("evaluated", every_steps=1, **SAMPLED) == losses("alone")

    def test_a_resumed_run_repeats_no_evaluation(self, make_config: ConfigMaker) -> None:
        run_dir = penstock.train(make_config(**{"eval.every_steps": 1, "training.max_steps": 2})).run_dir
        before = evals(run_dir)
        result = resume(run_dir, ["training.max_steps=3"])
        after = evals(run_dir)
        assert [line["step"] for line in after] == [0, 1, 2, 3]
        assert after[:3] == before
        assert result.summary["eval/reward_mean_start"] == before[0]["eval/reward_mean"]
        assert result.summary["eval/reward_mean"] == after[3]["eval/reward_mean"]

    @pytest.mark.long
    def test_a_resumed_run_has_no_initial_weights_to_evaluate(self, make_config: ConfigMaker) -> None:
        quiet = {"at_start": False, "at_end": False}
        run_dir = penstock.train(make_config(**{"eval": quiet, "training.max_steps": 1})).run_dir
        resume(run_dir, ["training.max_steps=2", "eval.at_start=true", "eval.at_end=true"])
        assert [(line["step"], line["eval/version"]) for line in evals(run_dir)] == [(2, 2)]


class TestEarlyStop:
    def test_a_run_ends_with_the_step_that_reached_it(
        self, make_config: ConfigMaker, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stop = {"metric": "train/reward_mean", "reached": LEAST}
        config = make_config(**{"training.early_stop": stop, "training.max_steps": 5, "observe.console": "plain"})
        result = penstock.train(config)
        assert result.stopped_by == "early_stop"
        (line,) = steps(result.run_dir)
        (event,) = events(result.run_dir, "early_stop")
        wanted = ("train/reward_mean", line["train/reward_mean"])
        assert (event["metric"], event["value"], event["step"]) == (*wanted, 1)
        summary = json.loads((result.run_dir / "summary.json").read_text(encoding="utf-8"))
        assert (summary["stopped_by"], summary["steps"]) == ("early_stop", 1)
        assert (summary["early_stop_metric"], summary["early_stop_value"]) == wanted
        assert "has reached -1 (training.early_stop.reached)" in summary["early_stop_reason"]
        assert summary["early_stop_reason"] in capsys.readouterr().out
        assert (result.run_dir / "checkpoints" / "step_1").is_dir()
        assert [found["step"] for found in evals(result.run_dir)] == [0, 1]
        assert "stopped early: train/reward_mean" in (result.run_dir / "report.html").read_text(encoding="utf-8")

    def test_patience_counts_the_evaluation_of_the_initial_weights(self, make_config: ConfigMaker) -> None:
        stop = {"patience": 2, "min_change": 100.0}
        config = make_config(
            **{"training.early_stop": stop, "training.max_steps": 6, "eval.every_steps": 1, "checkpoint.every_steps": 2}
        )
        result = penstock.train(config)
        assert (result.stopped_by, result.summary["steps"]) == ("early_stop", 2)
        assert [line["step"] for line in evals(result.run_dir)] == [0, 1, 2]

    def test_initial_weights_that_are_good_enough_are_not_trained(self, make_config: ConfigMaker) -> None:
        stop = {"reached": LEAST}
        result = penstock.train(make_config(**{"training.early_stop": stop, "eval.every_steps": 1}))
        assert (result.stopped_by, result.summary["steps"]) == ("early_stop", 0)
        assert result.summary["eval/reward_mean"] == result.summary["eval/reward_mean_start"]
        assert len(evals(result.run_dir)) == 1

    def test_a_metric_that_no_step_has_is_refused_at_the_first(self, make_config: ConfigMaker) -> None:
        stop = {"metric": "train/reward_maen", "reached": 1.0}
        with pytest.raises(ConfigError, match="did you mean train/reward_mean"):
            penstock.train(make_config(**{"training.early_stop": stop}))

    def test_a_verdict_with_the_very_last_step_counts(self, make_config: ConfigMaker) -> None:
        stop = {"metric": "train/version", "reached": 3.0}
        result = penstock.train(make_config(**{"training.early_stop": stop, "eval.at_start": False}))
        assert (result.stopped_by, result.summary["steps"]) == ("early_stop", 3)


def test_a_rank_that_cannot_be_built_is_named_and_those_before_it_are_closed(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        @classmethod
        def from_pretrained(cls, *_: Any, name: str, **settings: Any) -> Engine:
            if name == "embedded-1":
                raise SetupError("no room for embedded-1")
            return cls(name)

        async def close(self) -> None:
            ends.append(self.name)

    monkeypatch.setitem(build_engines._ENGINES, "embedded", Engine.from_pretrained)
    with pytest.raises(SetupError, match="no room for embedded-1"):
        evaluate(make_config(**{"rollout.engine.ranks": 2}))
    assert ends == ["embedded-0"]


class TestCheckpointsOfARun:
    def test_by_name_best_and_newest(self, make_config: ConfigMaker) -> None:
        checkpoint = {
            "every_steps": 1,
            "keep_latest": 1,
            "keep_best": 2,
            "best_metric": "train/version",
            "best_mode": "min",
        }
        config = make_config(checkpoint=checkpoint, eval={"every_steps": 1, **SAMPLED})
        run_dir = penstock.train(config).run_dir
        rewards = {line["step"]: line["eval/reward_mean"] for line in evals(run_dir)}
        for name, step in ((None, 3), ("best", 1), ("step_2", 2)):
            figures = evaluate(config, run_dir, name)
            assert figures["model"].endswith(f"step_{step}")
            assert figures["eval/reward_mean"] == pytest.approx(rewards[step])
            assert (figures["prompts"], figures["eval/responses"], figures["eval/failures"]) == (6, 18, 0)
            assert 0 <= figures["eval/pass@1"] <= figures["eval/pass@3"] <= 1

    def test_one_that_is_not_there_is_refused_with_those_that_are(self, make_config: ConfigMaker) -> None:
        config = make_config(**{"training.max_steps": 1, "eval": {"at_start": False, "at_end": False}})
        run_dir = penstock.train(config).run_dir
        with pytest.raises(SetupError, match=r"there is no 'step_7' in .*; it has step_1"):
            evaluate(config, run_dir, "step_7")
        with pytest.raises(SetupError, match="has a value of eval/reward_mean"):
            evaluate(config, run_dir, "best")

"""Evaluation and `penstock verify` use every rank, and what is wrong with one of them shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.fleet import EngineFleet
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps
from tests.run.verifying import Verify, verify

__all__ = ["verify"]


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> list[EngineFleet]:
    """All fleets that are made."""
    found: list[EngineFleet] = []
    made = EngineFleet.__init__

    def noting(fleet: EngineFleet, *args: Any, **options: Any) -> None:
        made(fleet, *args, **options)
        found.append(fleet)

    monkeypatch.setattr(EngineFleet, "__init__", noting)
    return found


@pytest.mark.long
def test_verify_checks_every_rank(verify: Verify, fleets: list[EngineFleet]) -> None:
    verified = verify(**{"rollout.engine.ranks": 2})
    assert verified.exit_code == 0
    figures = verified.checks["weight_sync"]["figures"]
    assert figures["ranks"] == 2
    (fleet,) = fleets
    assert all(stats.tokens_generated for stats in fleet.rank_stats().values())


@pytest.mark.long
def test_verify_finds_the_rank_that_does_not_take_its_weights(verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over = EmbeddedEngine._take_over

    def wrong_in_the_second(self: EmbeddedEngine, version: int, weights: Any) -> None:
        take_over(self, version, weights)
        if self.name == "embedded-1" and version > 0:
            next(self._runner.lm.model.parameters()).data.add_(1.0)

    monkeypatch.setattr(EmbeddedEngine, "_take_over", wrong_in_the_second)
    verified = verify(**{"rollout.engine.ranks": 2})
    assert verified.exit_code == 1
    assert verified.with_status("fail") == ["weight_sync"]
    assert verified.figures("weight_sync")["wrong"] == 1


@pytest.mark.long
def test_an_evaluation_uses_every_rank_and_gives_the_same_figures(
    make_config: ConfigMaker, fleets: list[EngineFleet]
) -> None:
    several = penstock.evaluate(make_config(**{"rollout.engine.ranks": 3, "data.eval_size": 12}))
    assert all(stats.tokens_generated for stats in fleets[-1].rank_stats().values())
    alone = penstock.evaluate(make_config(**{"data.eval_size": 12}))
    assert (several.reward_mean, several.response_length_mean) == (alone.reward_mean, alone.response_length_mean)


def test_a_run_with_two_ranks_in_threads_tells_the_figures_of_both(make_config: ConfigMaker) -> None:
    result = penstock.train(make_config(**{"rollout.engine.ranks": 2, "training.max_steps": 2}))
    for line in steps(result.run_dir):
        rates = [line[f"rollout/engine/embedded-{number}/tokens_s"] for number in range(2)]
        assert min(rates) > 0
        assert sum(rates) == pytest.approx(line["throughput/generated_tokens_s"])
    trace = (Path(result.run_dir) / "trace.json").read_text(encoding="utf-8")
    assert '"embedded-0"' in trace
    assert '"embedded-1"' in trace

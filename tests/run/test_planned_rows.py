"""What metadata says of rows is what they are, wherever they come from: a rollout, a recording, a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import penstock
from penstock.data_plane.fields import VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.data_plane.row_plan import PLAN
from penstock.training import step_worker
from penstock.training.packing import PlanRule
from penstock.training.planning import facts_in
from penstock.training.sharding import MicrobatchPlan, RowFacts
from tests.run.conftest import ConfigMaker

PREPARED = {"algorithm.kl": {"coefficient": 0.1}}
QUIET = {"eval.at_start": False, "eval.at_end": False}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KVBatchMeta, tuple[RowFacts, ...]]]:
    """The chunks that were trained, and what their rows are."""
    seen: list[tuple[KVBatchMeta, tuple[RowFacts, ...]]] = []
    real = step_worker.plan_for

    def watched(meta: KVBatchMeta, facts: Sequence[RowFacts], rule: PlanRule) -> MicrobatchPlan:
        seen.append((meta, tuple(facts)))
        return real(meta, facts, rule)

    monkeypatch.setattr(step_worker, "plan_for", watched)
    return seen


def assert_true(planned: list[tuple[KVBatchMeta, tuple[RowFacts, ...]]]) -> None:
    assert planned
    for meta, facts in planned:
        assert all(tags[VALID_TOKENS] > 0 for tags in meta.tags)
        assert facts_in(meta) == facts


def test_rows_of_a_rollout(make_config: ConfigMaker, planned: list[Any]) -> None:
    penstock.train(make_config(**QUIET, **PREPARED, **{"training.max_steps": 1}))
    assert_true(planned)
    assert all(PLAN in meta.extra_info for meta, _ in planned)


@pytest.mark.long
def test_rows_of_a_recording_and_of_a_checkpoint(make_config: ConfigMaker, planned: list[Any], tmp_path: Any) -> None:
    checkpoints = {"checkpoint.every_steps": 1, "training.max_steps": 2}
    recorded = make_config(**QUIET, **checkpoints, run_dir=str(tmp_path / "recorded"), **{"rollout.record": True})
    source = penstock.train(recorded).run_dir
    planned.clear()
    replay = {"rollout.replay_from": str(source), "training.max_steps": 1}
    penstock.train(make_config(**QUIET, **replay, run_dir=str(tmp_path / "replayed")))
    assert_true(planned)
    planned.clear()
    penstock.resume(source, ["training.max_steps=3"])
    assert_true(planned)

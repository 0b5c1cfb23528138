"""Before a run: whether the rows of a step can fit into shared memory at all, and whether they might not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.config.models import RunConfig
from penstock.config.reading.environment_args import CalculatorArgs
from penstock.data_plane.adapters.shm.layout import PutPlan
from penstock.data_plane.field_spec import DTYPES
from penstock.errors import CannotStart, DataPlaneFull
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.environments.base import Segment, Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.rollout.environments.tasks.calculator import CalculatorEnvironment
from penstock.rollout.extra_values import stacked, with_columns
from penstock.rollout.recorded import FOLDER, RecordingFolder, RecordingInfo
from penstock.rollout.sample_columns import group_columns
from penstock.run.checks import find_problems
from penstock.run.problems import Level
from penstock.run.rollouts import shared_settings
from penstock.run.room import group_bytes
from tests.run.conftest import ConfigMaker


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 9), tokens=st.integers(2, 300), kept=st.integers(0, 3))
def test_the_size_of_a_group_is_that_of_its_put(rows: int, tokens: int, kept: int) -> None:
    columns = group_columns([trajectory(tokens, kept) for _ in range(rows)])
    assert group_bytes(rows, tokens, kept * (tokens - 1)) == PutPlan(columns).layout.size


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 5),
    tokens=st.integers(2, 40),
    forms=st.lists(
        st.tuples(
            st.sampled_from(["per_token", "fixed"]),
            st.sampled_from(sorted(DTYPES)),
            st.lists(st.integers(0, 3), max_size=2),
        ),
        max_size=4,
    ),
)
def test_columns_of_the_environments_own_take_what_they_take(
    rows: int, tokens: int, forms: list[tuple[Any, str, list[int]]]
) -> None:
    declared = [
        ExtraColumn(f"own{place}", kind, dtype, shape=tuple(shape), optional=True)
        for place, (kind, dtype, shape) in enumerate(forms)
    ]
    played = [with_columns(trajectory(tokens, 0), declared, "game", "g_g0") for _ in range(rows)]
    columns: Any = group_columns(played)
    columns |= stacked(played, declared, columns["input_ids"].offsets_R1)
    assert group_bytes(rows, tokens, 0, declared) == PutPlan(columns).layout.size


class WithPictures(CalculatorEnvironment):
    """Each sample has a picture of a megabyte."""

    extra_columns = (ExtraColumn("picture", "fixed", "uint8", shape=(1000, 1000)),)

    def __init__(self) -> None:
        super().__init__(CalculatorArgs(), train_size=1, eval_size=1, seed=0)


def test_columns_of_the_environments_own_must_fit(make_config: ConfigMaker) -> None:
    """4 groups of 3."""
    own = {"rollout.environment": {"kind": "custom", "import_path": f"{__name__}:WithPictures"}, "data": None}
    (found,) = problems(with_capacity(make_config, 11e6, **own), Level.ERROR)
    assert "is too small for a step" in found
    assert "take at least 0.012 GB" in found
    assert problems(with_capacity(make_config, 13e6, **own), Level.ERROR) == []


def test_columns_of_a_recording_must_fit(make_config: ConfigMaker, tmp_path: Path) -> None:
    replay = {"rollout.replay_from": str(tmp_path / "recorded"), "eval": {"at_start": False, "at_end": False}}
    config = with_capacity(make_config, 11e6, **replay)
    info = RecordingInfo(settings=shared_settings(config), tokenizer="any", columns=WithPictures.extra_columns)
    RecordingFolder(tmp_path / "recorded" / FOLDER, info)
    (found,) = problems(config, Level.ERROR)
    assert "take at least 0.012 GB" in found
    larger = config.data_plane.model_copy(update={"capacity_gb": 0.013})
    assert problems(config.model_copy(update={"data_plane": larger}), Level.ERROR) == []


def trajectory(tokens: int, kept: int) -> Trajectory:
    """A prompt of one token, and a response with `kept` ids for each of its tokens; no text."""
    count = tokens - 1
    ids = tuple(np.zeros(kept, dtype=np.int32) for _ in range(count)) if kept else ()
    made = GenerationResult("r", (1,) * count, (0.0,) * count, (0,) * count, FinishReason.STOP, kept_ids=ids)
    return Trajectory((Segment((1,)), Segment(made.token_ids, made)), 1.0, "")


def problems(config: RunConfig, level: Level) -> list[str]:
    return [str(each) for each in find_problems(config).all if each.level is level and "capacity_gb" in str(each)]


def with_capacity(make_config: ConfigMaker, size: float, **changes: Any) -> RunConfig:
    return make_config(**{"data_plane.adapter": "shm", "data_plane.capacity_gb": size / 1e9, **changes})


def test_a_step_of_the_shortest_rows_must_fit(make_config: ConfigMaker) -> None:
    """4 groups of 3."""
    least = 4 * group_bytes(3, 2)
    (found,) = problems(with_capacity(make_config, least - 64), Level.ERROR)
    assert re.match(
        r"data_plane\.capacity_gb: 3\.264e-06 is too small for a step.*4 groups "
        r"\(training\.prompt_groups_per_step\) of 3 take at least 3\.33e-06 GB, even with rows of 2 tokens; raise it",
        found,
    )
    with pytest.raises(CannotStart, match="too small for a step"):
        penstock.train(with_capacity(make_config, least - 64))
    assert not problems(with_capacity(make_config, least), Level.ERROR)
    assert not problems(make_config(), Level.ERROR), "memory has no limit"


def test_a_step_of_the_longest_rows_may_not_fit(make_config: ConfigMaker) -> None:
    """Rows have up to 96 tokens."""
    most = 4 * group_bytes(3, 96)
    (found,) = problems(with_capacity(make_config, most - 64), Level.WARNING)
    assert re.search(r"may be too small for a step.* with rows of 96 tokens \(rollout\.engine\.max_model_len\)", found)
    assert not problems(with_capacity(make_config, most), Level.WARNING)
    with_kl = {"algorithm.kl.coefficient": 0.1}
    assert problems(with_capacity(make_config, most, **with_kl), Level.WARNING), "the trainer adds columns"
    assert not problems(with_capacity(make_config, most - 64), Level.ERROR)


@pytest.mark.parametrize(
    "changes", [{"weight_sync.mode": "drain"}, {"staleness": {"policy": "in_order", "lookahead": 1}}]
)
def test_groups_of_later_steps_count_where_a_step_may_wait_behind_them(
    make_config: ConfigMaker, changes: dict[str, Any]
) -> None:
    whole = (4 + 32) * group_bytes(3, 96)
    (found,) = problems(with_capacity(make_config, whole - 64, **changes), Level.WARNING)
    assert "buffer.max_buffered_groups = 32" in found
    assert not problems(with_capacity(make_config, whole, **changes), Level.WARNING)
    assert not problems(with_capacity(make_config, whole - 64), Level.WARNING), "others only wait"


@pytest.mark.long
def test_a_group_larger_than_the_capacity_ends_the_run_at_once(make_config: ConfigMaker) -> None:
    config = with_capacity(make_config, group_bytes(3, 3), **{"training.prompt_groups_per_step": 1})
    with pytest.raises(DataPlaneFull, match=r"can never fit: data_plane\.capacity_gb is"):
        penstock.train(config)
    events = read_lines(Path(config.run_dir) / "events.jsonl")
    assert not [event for event in events if event["event"] in ("rollout_retried", "prompt_dropped")]


@pytest.mark.long
def test_a_run_that_finds_no_room_for_a_step_can_be_resumed_with_more(make_config: ConfigMaker) -> None:
    """It ends within seconds, long before a put gives up, and nothing is lost."""
    config = with_capacity(make_config, 1e6, **{"training.max_steps": 1})
    run_dir = penstock.train(config).run_dir
    small = ["training.max_steps=3", f"data_plane.capacity_gb={2.5 * group_bytes(3, 24) / 1e9}"]
    with pytest.raises(DataPlaneFull, match=r"too small for a step.*data_plane\.capacity_gb to"):
        penstock.resume(run_dir, small)
    result = penstock.resume(run_dir, ["training.max_steps=3", "data_plane.capacity_gb=0.01"])
    assert result.stopped_by == "max_steps"
    ends = [line for line in read_lines(run_dir / "ledger.jsonl") if "end" in line]
    assert len(ends) == 12
    assert {line["end"] for line in ends} == {"trained"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

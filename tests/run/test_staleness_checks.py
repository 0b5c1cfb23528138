"""What is told before a run about staleness: that nothing corrects it, or that its window is never reached."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.run.cautions import uncorrected_staleness
from penstock.run.checks import find_problems
from tests.run.checking import warnings
from tests.run.conftest import ConfigMaker

LOOSE = {"buffer.max_buffered_groups": 64, "rollout.max_inflight_groups": 64}
STALE: list[tuple[dict[str, Any], str | None]] = [
    ({"staleness": {"policy": "on_policy"}}, None),
    ({"staleness": {"policy": "windowed", "max_staleness": 0}}, None),
    ({"staleness": {"policy": "windowed", "max_staleness": 1}}, "staleness.max_staleness"),
    ({"staleness": {"policy": "in_order", "lookahead": 0}}, None),
    ({"staleness": {"policy": "in_order", "lookahead": 2}}, "staleness.lookahead"),
    ({"staleness": {"policy": "weight_fifo", "max_staleness": 1, "lookahead": 1}}, "staleness.max_staleness"),
    ({"staleness": {"policy": "weight_fifo", "max_staleness": 1, "lookahead": 0}}, None),
    ({"staleness": {"policy": "windowed", "max_staleness": 1}, "algorithm.old_policy": "engine"}, None),
    ({"staleness": {"policy": "windowed", "max_staleness": 1}, "algorithm.correction": {"kind": "tis"}}, None),
]


@pytest.mark.parametrize(("changes", "key"), STALE)
def test_staleness_that_nothing_corrects(make_config: ConfigMaker, changes: dict[str, Any], key: str | None) -> None:
    told = [p for p in find_problems(make_config(**LOOSE | changes)).warnings if "without a correction" in p.reason]
    assert [problem.key for problem in told] == ([] if key is None else [key])
    assert all("the ratio is exactly 1" in p.reason and "algorithm.old_policy to engine" in p.reason for p in told)


LOSSES = {
    "ppo_clip": ["correction.kind=tis", "old_policy=engine"],
    "cispo": ["correction.kind=tis", "old_policy=engine"],
    "gspo": ["correction.kind=sequence_masked", "old_policy=engine"],
    "reinforce": ["correction.kind=tis"],
    "custom": ["correction.kind=tis", "old_policy=engine"],
}
POLICIES: list[dict[str, Any]] = [
    {"policy": "windowed", "max_staleness": 2},
    {"policy": "in_order", "lookahead": 2},
    {"policy": "weight_fifo", "max_staleness": 2, "lookahead": 2},
    {"policy": "weight_fifo", "max_staleness": 2, "lookahead": 1},
    {"policy": "custom", "import_path": "tests.support.misbehaving.names:ExitingSampler"},
]


@pytest.mark.parametrize("staleness", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_advised_against_staleness_can_be_set(
    make_config: ConfigMaker, loss: str, staleness: dict[str, Any]
) -> None:
    own = {"import_path": "tests.support.custom_algorithms:clipped"} if loss == "custom" else {}
    settings = {**LOOSE, "staleness": staleness, "algorithm.loss": {"kind": loss, **own}}
    [line] = uncorrected_staleness(make_config(**settings))
    advice = re.findall(r"algorithm\.(\S+) to (\w+)", line)
    assert [f"{key}={value}" for key, value in advice] == LOSSES[loss]
    for key, value in advice:
        assert list(uncorrected_staleness(make_config(**settings, **{f"algorithm.{key}": value}))) == []
    if staleness["policy"] != "custom":
        reached = min(value for value in staleness.values() if isinstance(value, int))
        assert f"groups up to {reached} version" in line


TIS = {"algorithm.correction": {"kind": "tis"}}
WIDE = {"staleness": {"policy": "windowed", "max_staleness": 4}, "training.prompt_groups_per_step": 8}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"buffer.max_buffered_groups": 24, "rollout.max_inflight_groups": 64}, None),
        ({"buffer.max_buffered_groups": 25, "rollout.max_inflight_groups": 64}, "reached"),
        ({"buffer.max_buffered_groups": 64, "rollout.max_inflight_groups": 24}, "in-flight"),
        ({"buffer.max_buffered_groups": 64, "rollout.max_inflight_groups": 25}, "reached"),
        ({"buffer.max_buffered_groups": 24, "staleness": {**WIDE["staleness"], "order": "freshest"}}, "reached"),
        ({"staleness": {"policy": "weight_fifo", "max_staleness": 4, "lookahead": 2}}, "lookahead"),
        ({"buffer.max_buffered_groups": 64, "rollout.max_inflight_groups": 64, "data.train_size": 32}, "data"),
    ],
)
def test_a_window_that_other_settings_hold_below_its_size(
    make_config: ConfigMaker, changes: dict[str, Any], says: str | None
) -> None:
    config = make_config(**{**TIS, **WIDE, "data.train_size": 256, "training.max_steps": 16} | changes)
    reason = warnings(config).get("staleness.max_staleness", "reached")
    expected = {
        None: "buffer.max_buffered_groups = 24 holds the groups of 3 steps, so groups that end in order are at most 3 "
        "versions old; raise it to 25 or more, or lower the window",
        "in-flight": "rollout.max_inflight_groups = 24 has the groups of 3 steps in generation",
        "lookahead": "staleness.lookahead = 2 steps ahead; raise it to 4",
        "data": "the data lasts for 4 steps; raise data.epochs",
        "reached": "reached",
    }[says]
    assert reason == expected if says == "reached" else expected in reason

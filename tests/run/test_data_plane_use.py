"""What the data plane did is in metrics, timeline and report of a run, whichever process did it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError
from tests.run.conftest import ConfigMaker

PREFIX = "data_plane/"


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "timing/step_s" in line]


def tracks_of(run_dir: Path) -> dict[str, int]:
    """How many spans each track of the data plane has."""
    lines = json.loads((run_dir / "trace.json").read_text())
    names = {(line["pid"], line["tid"]): line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    named = [line for line in lines if line["name"] == "process_name"]
    processes = [line["pid"] for line in named if line["args"]["name"] == "data plane"]
    spans = [names[line["pid"], line["tid"]] for line in lines if line["pid"] in processes and line["ph"] == "X"]
    return {name: spans.count(name) for name in spans}


def test_a_run_measures_its_data_plane(make_config: ConfigMaker) -> None:
    config = make_config(**{"training.max_steps": 2})
    result = penstock.train(config)
    steps = steps_of(result.run_dir)
    rows = config.training.prompt_groups_per_step
    for step in steps:
        assert step[f"{PREFIX}put/count"] >= rows, "each group is put, and its advantages"
        assert step[f"{PREFIX}put/bytes"] > 0
        assert step[f"{PREFIX}get/bytes"] > 0
        assert step[f"{PREFIX}clear/count"] >= 1
        assert 0 < step[f"{PREFIX}put/p50_ms"] <= step[f"{PREFIX}put/p99_ms"]
        assert 0 < step[f"{PREFIX}time_s"] < step["timing/elapsed_s"]
        assert step[f"{PREFIX}peak_bytes"] >= step[f"{PREFIX}outstanding_bytes"]
        assert f"{PREFIX}put/errors" not in step
    tracks = tracks_of(result.run_dir)
    assert sum(count for name, count in tracks.items() if name.startswith("put")) >= 2 * rows
    page = (result.run_dir / "report.html").read_text()
    assert "<h2>Data plane</h2>" in page
    assert "<code>put</code>" in page


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"observe": False, "on_event": "my_module:f"}, r"data_plane\.on_event: has no effect with observe = false"),
        ({"on_event": "my_module.f"}, r"data_plane\.on_event: .*is not module:thing"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    make_config: ConfigMaker, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make_config(data_plane=settings)


def test_a_function_that_is_not_there_ends_the_run_before_it_begins(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"data_plane\.on_event: module 'no_such_module' cannot be imported"):
        penstock.train(make_config(**{"data_plane.on_event": "no_such_module:f"}))


@pytest.mark.long
def test_a_run_that_is_not_observed_has_none_of_it(make_config: ConfigMaker) -> None:
    result = penstock.train(make_config(**{"training.max_steps": 1, "data_plane.observe": False}))
    assert not [key for step in steps_of(result.run_dir) for key in step if key.startswith(PREFIX)]
    assert tracks_of(result.run_dir) == {}
    assert "<h2>Data plane</h2>" not in (result.run_dir / "report.html").read_text()


@pytest.mark.long
def test_what_the_trainers_process_reads_is_counted(make_config: ConfigMaker, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "training.max_steps": 4,
        "runtime.trainer_process": True,
        "data_plane": {"adapter": "shm", "capacity_gb": 0.05},
    }
    result = penstock.train(make_config(**settings))
    tracks = tracks_of(result.run_dir)
    assert tracks["trainer: get"] >= 2
    assert tracks["row worker: get"] >= 1, "samples of the first steps, which are shown"
    in_thread = penstock.train(
        make_config(**{**settings, "runtime.trainer_process": False, "run_dir": str(tmp_path / "other")})
    )
    for here, there in zip(steps_of(in_thread.run_dir), steps_of(result.run_dir), strict=True):
        assert there[f"{PREFIX}get/count"] >= 2
        assert there[f"{PREFIX}get/bytes"] > 0
        assert here[f"{PREFIX}get/count"] >= 2


@pytest.mark.long
def test_losses_are_the_same_to_the_bit_with_and_without(make_config: ConfigMaker, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "deterministic": True,
        "staleness": {"policy": "in_order", "lookahead": 0},
        "weight_sync.mode": "drain",
        "training.max_steps": 3,
    }
    watched = penstock.train(make_config(**settings, **{"data_plane.on_event": "math:isnan"}))
    plain = penstock.train(make_config(**settings, **{"data_plane.observe": False, "run_dir": str(tmp_path / "other")}))
    same = ("train/loss", "train/grad_norm", "train/reward_mean", "train/entropy")
    figures = [[[step[key] for key in same] for step in steps_of(run.run_dir)] for run in (watched, plain)]
    assert figures[0] == figures[1]

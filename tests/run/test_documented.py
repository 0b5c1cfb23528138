"""docs/metrics.md names every key and event that a run writes."""

from __future__ import annotations

import re
from pathlib import Path

import penstock
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    """The names on the page; `<lag>` and its like stand for anything."""
    return {re.sub(r"<.*>", "*", name) for name in re.findall(r"`([^`]+)`", DOCS.read_text(encoding="utf-8"))}


def test_every_metric_and_event_is_explained(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "sampler": {"kind": "windowed", "max_staleness": 1},
            "algorithm.correction": {"kind": "tis"},
            "checkpoint.every_steps": 1,
        }
    )
    run_dir = penstock.train(config).run_dir
    known = documented()
    for line in lines(run_dir / "metrics.jsonl"):
        for key in line:
            plain = re.sub(r"(lag_histogram/)\d+$", r"\1*", key).removesuffix(f"/{config.rollout.environment.kind}")
            assert plain in known or key.startswith("eval/"), f"{key} is not in docs/metrics.md"
    for event in {line["event"] for line in lines(run_dir / "events.jsonl")}:
        assert event in known

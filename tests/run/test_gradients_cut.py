"""A run whose correction leaves nothing to train says so, in its events and on the console."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.run.train import train
from tests.run.conftest import ConfigMaker


def test_a_run_that_masks_everything_says_so_once(make_config: ConfigMaker) -> None:
    correction = {"kind": "decoupled", "cap": 1e-3}
    config = make_config(**{"algorithm.correction": correction, "training.max_steps": 4})
    train(config)
    lines = (Path(config.run_dir) / "events.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["event"] == "gradients_cut"]
    assert event["step"] == 3
    assert "of the tokens are masked by the correction" in event["what"]
    assert "algorithm.correction" in event["advice"]

"""Rules of runs that only record, and of runs that only replay."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from penstock.config.reading.loading import dump_config, parse_config
from tests.config.settings import problems, settings

NO_EVAL = {"eval__at_start": False, "eval__at_end": False}
REPLAY = {"rollout__replay_from": "runs/recorded", **NO_EVAL}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"training__backend": "none"}, "training.backend"),
        ({**REPLAY, "training__backend": "none"}, "training.backend"),
        ({**REPLAY, "rollout__record": True}, "rollout.record"),
        ({**REPLAY, "eval__at_start": True}, "eval.at_start"),
        ({**REPLAY, "eval__at_end": True}, "eval.at_end"),
        ({**REPLAY, "eval__every_steps": 2}, "eval.every_steps"),
        ({**REPLAY, "run_dir": "runs/recorded"}, "rollout.replay_from"),
        ({**REPLAY, "run_dir": "./runs/recorded/"}, "rollout.replay_from"),
    ],
)
def test_contradiction_names_the_key(given: dict[str, Any], key: str) -> None:
    (line,) = problems(**given)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "given",
    [
        REPLAY,
        {"rollout__record": True},
        {"rollout__record": True, "training__backend": "none"},
        {"rollout__record": True, "training__backend": "none", "checkpoint__every_steps": 2, **NO_EVAL},
    ],
)
def test_settings_that_go_together_are_accepted_and_written_back(given: dict[str, Any]) -> None:
    config = parse_config(settings(**given))
    assert parse_config(yaml.safe_load(dump_config(config))) == config

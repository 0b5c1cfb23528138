"""A model folder and a configuration that trains it in a second or two."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.models import RunConfig
from penstock.config.reading.loading import parse_config
from tests.support.tiny_models import save_tiny_model

ConfigMaker = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def run_config(run_dir: Path, model_folder: Path, /, **changes: Any) -> RunConfig:
    """A config with dotted changes; None takes a setting away."""
    settings: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"path": str(model_folder)},
        "data": {"train_size": 24, "eval_size": 6},
        "rollout": {
            "environment": {
                "kind": "reasoning_gym:chain_sum",
                "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            },
            "group_size": 3,
            "sampling": {"max_new_tokens": 6},
            "engine": {"max_num_seqs": 12, "max_model_len": 96},
            "failure": {"backoff_seconds": 0},
        },
        "training": {"prompt_groups_per_step": 4, "max_steps": 3, "optimizer": {"lr": 1e-3}},
        "runtime": {"device": "cpu", "engine_threads": 1, "trainer_threads": 1},
        "observe": {"console": "off"},
    }
    for key, value in changes.items():
        *path, last = key.split(".")
        section = settings
        for name in path:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = copy.deepcopy(value)  # a later change may be inside of it
    return parse_config(settings, "test")


@pytest.fixture
def make_config(model_folder: Path, tmp_path: Path) -> ConfigMaker:
    """A config with dotted changes: `make_config(**{"training.max_steps": 3})`."""
    return config_maker(model_folder, tmp_path)


def config_maker(model_folder: Path, tmp_path: Path) -> ConfigMaker:
    """As `make_config`, for a run in `tmp_path / "run"`."""

    def make(**changes: Any) -> RunConfig:
        return run_config(tmp_path / "run", model_folder, **changes)

    return make


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """Processes that a test starts hear SIGHUP, also where the tests themselves were started to ignore it (nohup)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)

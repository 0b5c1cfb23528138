from __future__ import annotations

import pytest

from penstock.config.sections.training import OptimizerConfig
from penstock.training.schedule import learning_rate


def rates(updates: range, max_steps: int | None = None, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    return [learning_rate(config, update, max_steps) for update in updates]


def test_constant_stays() -> None:
    assert rates(range(3)) == [1.0, 1.0, 1.0]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert rates(range(5), warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_to_its_end_and_stays_there() -> None:
    found = rates(range(8), 6, schedule="linear", warmup_steps=2, final_lr_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = rates(range(5), 4, schedule="cosine", final_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[2] == pytest.approx(0.55)
    assert found[4] == pytest.approx(0.1)

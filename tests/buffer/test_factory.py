"""From settings to samplers, and the check of the buffer's size."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.samplers.factory import check_capacity, make_sampler
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.ready_first import ReadyFirst
from penstock.buffer.samplers.weight_fifo import WeightFifo
from penstock.buffer.samplers.windowed import Order, Windowed
from penstock.config.sections.staleness import (
    CustomStaleness,
    InOrderStaleness,
    OnPolicyStaleness,
    ReadyFirstStaleness,
    StalenessConfig,
    WeightFifoStaleness,
    WindowedStaleness,
)
from penstock.errors import ConfigError

HERE = __name__


@dataclass(frozen=True)
class Patient(Windowed):
    """A policy of one's own."""

    patience: int = 1


class Hollow:
    """Lacks nearly everything."""

    def __init__(self, prompt_groups_per_step: int) -> None: ...

    def admit(self) -> None: ...


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OnPolicyStaleness(), OnPolicy(4)),
        (
            WindowedStaleness(max_staleness=3, over_sampling=True, order="freshest"),
            Windowed(4, 3, True, Order.FRESHEST),
        ),
        (InOrderStaleness(lookahead=2), InOrder(4, 2, False)),
        (WeightFifoStaleness(max_staleness=3, lookahead=2), WeightFifo(4, 3, 2)),
        (ReadyFirstStaleness(lookahead=2), ReadyFirst(4, 2)),
        (CustomStaleness(import_path=f"{HERE}:Patient", args={"patience": 7}), Patient(4, patience=7)),
    ],
)
def test_every_setting_reaches_its_sampler(config: StalenessConfig, expected: StalenessSampler) -> None:
    assert make_sampler(config, 4) == expected


def test_deterministic_mode_makes_in_order_strict() -> None:
    assert make_sampler(InOrderStaleness(lookahead=0), 4, deterministic=True) == InOrder(4, 0, strict_sequence=True)


def test_deterministic_mode_rejects_samplers_without_a_fixed_order() -> None:
    with pytest.raises(ConfigError, match=r"staleness\.policy: windowed"):
        make_sampler(WindowedStaleness(), 4, deterministic=True)


@pytest.mark.parametrize(
    ("import_path", "message"),
    [
        ("no_such_module_here:Policy", r"staleness\.import_path: no_such_module_here:Policy cannot be imported"),
        (f"{HERE}:NoSuchClass", r"staleness\.import_path: .*NoSuchClass"),
        (
            f"{HERE}:Hollow",
            r"staleness\.import_path: .*Hollow does not define bucket, evict, rank, ",
        ),
    ],
)
def test_a_custom_class_that_cannot_be_used_is_named(import_path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sampler(CustomStaleness(import_path=import_path), 4)


def test_arguments_that_a_custom_class_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"staleness\.args: .*patients"):
        make_sampler(CustomStaleness(import_path=f"{HERE}:Patient", args={"patients": 7}), 4)


def test_a_buffer_that_is_too_small_is_rejected_with_the_number_to_use() -> None:
    sampler = InOrder(8, lookahead=1)
    check_capacity(sampler, 10, min_groups_per_chunk=2)
    with pytest.raises(ConfigError) as caught:
        check_capacity(sampler, 4, min_groups_per_chunk=2)
    (problem,) = caught.value.problems
    assert problem.startswith("buffer.max_buffered_groups: 4 is too small for the staleness policy in_order")
    assert problem.endswith("use at least 10")


def test_a_step_needs_at_least_one_group() -> None:
    with pytest.raises(ConfigError, match="prompt_groups_per_step"):
        ReadyFirst(0)


def test_the_buffer_does_not_import_torch() -> None:
    code = (
        "import sys, penstock.buffer.replay_buffer, penstock.buffer.samplers.factory; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

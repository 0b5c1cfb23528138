"""A setting under its old name is answered with the new one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.models import RunConfig
from penstock.config.other_names.ours import RENAMED, RENAMED_VALUES
from penstock.config.reading.keys import KeySpec, all_keys
from tests.config.settings import problems

OLD_SECTIONS = ("sampler", "weights")


def nested(key: str, value: Any) -> dict[str, Any]:
    """`problems` with only this setting."""
    return {key.replace(".", "__"): value}


@pytest.mark.parametrize("old", [key for key in RENAMED if key not in OLD_SECTIONS])
def test_every_old_name_is_answered_with_the_new_one(old: str) -> None:
    assert problems(**nested(old, 1))[0] == f"{old}: unknown setting; `{old}` is `{RENAMED[old]}` here"


def test_new_names_exist_and_old_ones_do_not() -> None:
    keys = set(all_keys(RunConfig))
    assert set(RENAMED.values()) <= keys
    assert not set(RENAMED) & keys


def test_every_setting_of_an_old_section_is_answered() -> None:
    given = {"kind": "windowed", "max_staleness": 2, "mistyped": 1}
    assert problems(sampler=given, weights={"update": "drain"}) == [
        "sampler.kind: unknown setting; `sampler.kind` is `staleness.policy` here",
        "sampler.max_staleness: unknown setting; `sampler.max_staleness` is `staleness.max_staleness` here",
        "sampler.mistyped: unknown setting; `sampler` is `staleness` here",
        "weights.update: unknown setting; `weights.update` is `weight_sync.mode` here",
    ]
    assert problems(sampler="windowed") == ["sampler: unknown setting; `sampler` is `staleness` here"]
    assert problems(weights={}) == ["weights: unknown setting; `weights` is `weight_sync` here"]


def test_a_choice_whose_kind_has_its_old_name() -> None:
    assert problems(staleness={"kind": "windowed", "max_staleness": 2}) == [
        "staleness.kind: unknown setting; `staleness.kind` is `staleness.policy` here"
    ]


@pytest.mark.parametrize(("key", "old"), [(key, old) for key, names in RENAMED_VALUES.items() for old in names])
def test_every_old_value_is_answered_with_the_new_one(key: str, old: str) -> None:
    assert problems(**nested(key, old)) == [f"{key}: `{old}` is `{RENAMED_VALUES[key][old]}` here"]


def test_an_old_value_of_an_old_name() -> None:
    assert problems(algorithm__loss__level="sequence") == [
        "algorithm.loss.level: unknown setting; `algorithm.loss.level` is `algorithm.loss.aggregation` here, and "
        "`sequence` is `sequence_mean`"
    ]


def test_bounds_of_rewards_keep_their_names() -> None:
    place = KeySpec.of(RunConfig.model_fields["algorithm"].annotation).below("reward")
    assert place is not None
    assert {"clip_low", "clip_high"} <= set(place.sections[0].model_fields)

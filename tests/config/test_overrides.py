"""Settings on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.models import RunConfig
from penstock.config.reading.overrides import apply_overrides
from penstock.errors import ConfigError


def apply(data: dict[str, Any], *overrides: str) -> dict[str, Any]:
    return apply_overrides(data, overrides, RunConfig)


def problem(data: dict[str, Any], override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        apply(data, override)
    assert caught.value.source == "command line"
    (line,) = caught.value.problems
    return line


def test_values_are_yaml() -> None:
    assert apply({}, "training.max_steps=5", "training.optimizer.betas=[0.9, 0.95]", "training.max_minutes=null") == {
        "training": {"max_steps": 5, "optimizer": {"betas": [0.9, 0.95]}, "max_minutes": None}
    }


def test_a_section_can_be_replaced_as_a_whole() -> None:
    data = {"staleness": {"policy": "windowed", "max_staleness": 2}}
    assert apply(data, "staleness={policy: in_order, lookahead: 0}") == {
        "staleness": {"policy": "in_order", "lookahead": 0}
    }


def test_text_settings_take_the_value_as_it_stands() -> None:
    applied = apply(
        {}, "run_dir=2024", "model.path=a: [b", "observe.console=off", "rollout.environment.import_path=m:f=g"
    )
    assert applied == {
        "run_dir": "2024",
        "model": {"path": "a: [b"},
        "observe": {"console": "off"},
        "rollout": {"environment": {"import_path": "m:f=g"}},
    }


def test_text_settings_that_may_be_unset_take_null() -> None:
    assert apply({"data": {"eval_path": "x"}}, "data.eval_path=null") == {"data": {"eval_path": None}}


def test_free_mappings_take_any_key() -> None:
    assert apply({}, "rollout.environment.args.max_terms=3") == {"rollout": {"environment": {"args": {"max_terms": 3}}}}


def test_the_last_override_of_a_key_wins_and_the_data_given_stays_as_it_was() -> None:
    data: dict[str, Any] = {"training": {"max_steps": 1}}
    assert apply(data, "training.max_steps=2", "training.max_steps=3") == {"training": {"max_steps": 3}}
    assert data == {"training": {"max_steps": 1}}


def test_an_empty_section_of_the_file_is_filled() -> None:
    assert apply({"training": None}, "training.max_steps=2") == {"training": {"max_steps": 2}}


def test_keys_the_models_do_not_know_are_left_for_them_to_reject() -> None:
    assert apply({}, "trainin.x.y=2") == {"trainin": {"x": {"y": 2}}}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train", "train: is not key=value; write for example training.max_steps=100"),
        ("=5", "=5: has an empty name before the '='; write for example training.max_steps=100"),
        ("a..b=5", "a..b=5: has an empty name before the '='; write for example training.max_steps=100"),
        ("seed=", "seed: has no value; write seed=null to unset it"),
        ("seed.x=1", "seed.x: seed is a single value, not a section"),
        ("training.max_steps.x=1", "training.max_steps.x: training.max_steps is a single value, not a section"),
        (
            "training.optimizer.betas.0=0.9",
            "training.optimizer.betas.0: training.optimizer.betas is a list; give it as a whole, "
            "training.optimizer.betas=[...]",
        ),
        ("training.max_steps={", "training.max_steps: the value '{' is not valid YAML"),
        (
            "training.max_steps={a: 1, a: 2}",
            "training.max_steps: the value '{a: 1, a: 2}' is not valid YAML: duplicate key 'a'; the first is in line 1",
        ),
        ("model.path=x", "model.path: model is 'tiny' in the file, not a section"),
    ],
)
def test_wrong_override(override: str, line: str) -> None:
    assert problem({"model": "tiny"}, override) == line


def test_all_wrong_overrides_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        apply({}, "a", "seed=1", "b")
    assert [line.partition(":")[0] for line in caught.value.problems] == ["a", "b"]

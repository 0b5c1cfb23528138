"""Settings that cannot both be honoured."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.loading import parse_config
from tests.config.settings import problems, settings

TIS = {"kind": "tis"}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"training__min_groups_per_chunk": 9}, "training.min_groups_per_chunk"),
        ({"sampler__kind": "ready_first"}, "sampler.kind"),
        ({"sampler__kind": "in_order", "weights__update": "abort_stale"}, "weights.update"),
        (
            {"rollout__failure__on_drop": "shrink", "rollout__failure__min_groups_per_step": 9},
            "rollout.failure.min_groups_per_step",
        ),
        ({"rollout__failure__min_groups_per_step": 1}, "rollout.failure.min_groups_per_step"),
        ({"rollout__sampling__top_p": 0.9}, "rollout.sampling.top_p"),
        ({"rollout__sampling__top_k": 5}, "rollout.sampling.top_k"),
        ({"algorithm__old_policy": "engine", "algorithm__correction": TIS}, "algorithm.correction.kind"),
        ({"rollout__group_size": 1}, "rollout.group_size"),
        ({"rollout__sampling__max_new_tokens": 512}, "rollout.sampling.max_new_tokens"),
        ({"weights__update": "drain", "weights__kv_cache": "keep"}, "weights.kv_cache"),
        ({"data__train_path": "x.jsonl"}, "data.train_path"),
        ({"data__answer_key": "a"}, "data.answer_key"),
        ({"rollout__environment__function": "m:f"}, "rollout.environment.function"),
        ({"training__optimizer__schedule": "cosine"}, "training.max_steps"),
        ({"training__optimizer__final_lr_ratio": 0.1}, "training.optimizer.final_lr_ratio"),
    ],
)
def test_contradiction_names_the_key(given: dict[str, Any], key: str) -> None:
    (line,) = problems(**given)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize("function", [None, "module", "a:b:c", "a:", ":b"])
def test_function_environment_needs_a_callable_and_a_file(function: str | None) -> None:
    lines = problems(rollout__environment={"kind": "function", "function": function})
    assert [line.partition(":")[0] for line in lines] == ["rollout.environment.function", "data.train_path"]


@pytest.mark.parametrize(
    "given",
    [
        {"sampler__kind": "ready_first", "algorithm__correction": TIS},
        {"rollout__sampling__top_p": 0.9, "algorithm__old_policy": "engine"},
        {"deterministic": True, "sampler": {"kind": "in_order", "lookahead": 0}, "weights__update": "drain"},
        {"rollout__failure__on_drop": "shrink", "rollout__failure__min_groups_per_step": 8},
        {"training__optimizer": {"schedule": "cosine", "final_lr_ratio": 0.1}, "training__max_steps": 5},
        {"data__train_path": None, "data__eval_path": None},
    ],
)
def test_settings_that_go_together_are_accepted(given: dict[str, Any]) -> None:
    parse_config(settings(**given))

"""Settings that cannot both be honoured."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from penstock.config.reading.loading import dump_config, parse_config
from tests.config.settings import problems, settings

TIS = {"kind": "tis"}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"training__min_groups_per_chunk": 9}, "training.min_groups_per_chunk"),
        ({"staleness__policy": "ready_first"}, "staleness.policy"),
        ({"staleness__policy": "in_order", "weight_sync__mode": "abort_stale"}, "weight_sync.mode"),
        ({"staleness": {"policy": "weight_fifo", "lookahead": 2, "max_staleness": 1}}, "staleness.lookahead"),
        (
            {"rollout__failure__on_drop": "shrink", "rollout__failure__min_groups_per_step": 9},
            "rollout.failure.min_groups_per_step",
        ),
        ({"rollout__failure__min_groups_per_step": 1}, "rollout.failure.min_groups_per_step"),
        ({"algorithm__old_policy": "engine", "algorithm__correction": TIS}, "algorithm.correction.kind"),
        ({"rollout__group_size": 1}, "rollout.group_size"),
        ({"rollout__sampling__max_new_tokens": 512}, "rollout.sampling.max_new_tokens"),
        ({"weight_sync__mode": "drain", "weight_sync__kv_cache": "keep"}, "weight_sync.kv_cache"),
        ({"data__train_path": "x.jsonl"}, "data.train_path"),
        ({"data__answer_key": "a"}, "data.answer_key"),
        ({"rollout__environment__import_path": "m:f"}, "rollout.environment.import_path"),
        ({"training__optimizer__schedule": "cosine"}, "training.max_steps"),
        ({"training__optimizer__final_lr_ratio": 0.1}, "training.optimizer.final_lr_ratio"),
    ],
)
def test_contradiction_names_the_key(given: dict[str, Any], key: str) -> None:
    (line,) = problems(**given)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize("function", [None, "module", "a:b:c", "a:", ":b"])
def test_function_environment_needs_a_callable_and_a_file(function: str | None) -> None:
    lines = problems(rollout__environment={"kind": "function", "import_path": function})
    assert [line.partition(":")[0] for line in lines] == ["rollout.environment.import_path", "data.train_path"]


@pytest.mark.parametrize(
    "given",
    [
        {"staleness__policy": "ready_first", "algorithm__correction": TIS},
        {"rollout__sampling__top_p": 0.9, "algorithm__old_policy": "engine"},
        {"rollout__sampling__top_k": 5, "rollout__sampling__min_p": 0.1},
        {"deterministic": True, "staleness": {"policy": "in_order", "lookahead": 0}, "weight_sync__mode": "drain"},
        {"rollout__failure__on_drop": "shrink", "rollout__failure__min_groups_per_step": 8},
        {"training__optimizer": {"schedule": "cosine", "final_lr_ratio": 0.1}, "training__max_steps": 5},
        {"data__train_path": None, "data__eval_path": None},
    ],
)
def test_settings_that_go_together_are_accepted(given: dict[str, Any]) -> None:
    parse_config(settings(**given))


WHOLE = {"training__min_groups_per_chunk": 8}
SOFT = {"overlong": "soft", "overlong_buffer": 8}
KL_REWARD = {"coefficient": 0.1, "estimator": "k1", "place": "reward"}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"algorithm__advantage": {"kind": "batch_whitened"}}, "algorithm.advantage.kind"),
        ({"algorithm__advantage": {"kind": "reinforce_pp"}}, "algorithm.advantage.kind"),
        ({"algorithm__advantage": {"kind": "leave_one_out"}, "rollout__group_size": 2}, "rollout.group_size"),
        ({"algorithm__reward": {"clip_low": 1.0, "clip_high": 1.0}}, "algorithm.reward.clip_low"),
        ({"algorithm__reward": {"overlong": "soft"}}, "algorithm.reward.overlong_buffer"),
        ({"algorithm__reward": {"overlong": "soft", "overlong_buffer": 65}}, "algorithm.reward.overlong_buffer"),
        (
            {"algorithm__reward": SOFT, "rollout__environment__kind": "calculator"},
            "algorithm.reward.overlong_limit",
        ),
        ({"algorithm__reward": {"overlong": "mask", "overlong_limit": 9}}, "algorithm.reward.overlong_limit"),
        ({"algorithm__advantage": {"normalize_std": False, "epsilon": 0.1}}, "algorithm.advantage.epsilon"),
        (
            {"algorithm__dynamic_sampling": {"enabled": True}, "algorithm__kl": KL_REWARD},
            "algorithm.dynamic_sampling.enabled",
        ),
        ({"algorithm__reward": {"overlong": "mask", "overlong_penalty": 2.0}}, "algorithm.reward.overlong_penalty"),
        ({"algorithm__loss": {"aggregation": "token_sum_norm"}}, "algorithm.loss.constant_length"),
        ({"algorithm__loss": {"constant_length": 64}}, "algorithm.loss.constant_length"),
        ({"algorithm__loss": {"kind": "reinforce"}, "algorithm__old_policy": "engine"}, "algorithm.old_policy"),
        ({"algorithm__loss": {"kind": "gspo"}, "algorithm__correction": TIS}, "algorithm.correction.kind"),
        ({"algorithm__loss": {"kind": "gspo"}, "algorithm__kl": KL_REWARD}, "algorithm.kl.place"),
        ({"algorithm__kl": {"estimator": "k3"}}, "algorithm.kl.estimator"),
        ({"algorithm__kl": {"coefficient": 0.1, "estimator": "k1"}}, "algorithm.kl.estimator"),
        ({"algorithm__kl": {**KL_REWARD, "estimator": "k3"}}, "algorithm.kl.estimator"),
        (
            {"algorithm__advantage": {"kind": "reinforce_pp_baseline"}, "algorithm__kl": KL_REWARD, **WHOLE},
            "algorithm.kl.place",
        ),
        ({"training__minibatches_per_step": 2}, "training.minibatches_per_step"),
        ({"training__minibatches_per_step": 9, **WHOLE}, "training.minibatches_per_step"),
        (
            {"training__minibatches_per_step": 2, "algorithm__loss": {"kind": "reinforce"}, **WHOLE},
            "training.minibatches_per_step",
        ),
        ({"algorithm__dynamic_sampling": {"on_limit": "stop"}}, "algorithm.dynamic_sampling.on_limit"),
        (
            {"algorithm__dynamic_sampling": {"enabled": True}, "algorithm__advantage": {"kind": "reward"}},
            "algorithm.dynamic_sampling.enabled",
        ),
    ],
)
def test_algorithms_that_make_no_sense_are_rejected(given: dict[str, Any], key: str) -> None:
    (line,) = problems(**given)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm__advantage": {"kind": "reinforce_pp"}, "algorithm__kl": KL_REWARD, **WHOLE},
        {"algorithm__advantage": {"kind": "reward"}, "rollout__group_size": 1},
        {"algorithm__advantage": {"normalize_std": False}, "algorithm__loss": {"clip_ratio_high": 0.28}},
        {"algorithm__loss": {"kind": "gspo"}, "algorithm__correction": {"kind": "sequence_masked"}},
        {"algorithm__reward": {"overlong": "soft", "overlong_buffer": 16, "overlong_penalty": 0.5}},
        {"algorithm__dynamic_sampling": {"enabled": True, "max_filtered_per_step": 10}},
    ],
)
def test_algorithms_that_make_sense_are_taken(given: dict[str, Any]) -> None:
    config = parse_config(settings(**given))
    assert parse_config(yaml.safe_load(dump_config(config))) == config

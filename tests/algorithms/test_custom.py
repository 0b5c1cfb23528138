"""Losses and advantages of a user's own: the same numbers as built in, and clear words where they are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.algorithms.custom import CustomCodeError
from penstock.algorithms.losses import LossSum
from penstock.config.reading.loading import parse_config
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.controller.pumps.estimators import Scores, estimate_advantages, load_estimator
from penstock.errors import ConfigError
from penstock.training.objective import load_loss, policy_objective
from penstock.training.targets import TargetColumns

HERE = "tests.support.custom_algorithms"
REWARDS_S = torch.tensor([0.0, 1.0, 1.0, 3.0, 3.0, 3.0], dtype=torch.float64)
GROUPS = ([0, 1, 2], [3, 4, 5])


def algorithm(**sections: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(sections)


def custom(name: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "custom", "import_path": f"{HERE}:{name}", **settings}


def objective(rules: AlgorithmConfig, seed: int = 0) -> tuple[LossSum, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logprobs_T, engine_T = (-3 * torch.rand(8, generator=rng, dtype=torch.float64) for _ in range(2))
    ones_T, rows_T = torch.ones(8, dtype=torch.float64), torch.tensor([4, 4, 4, 1, 1, 7, 7, 7])
    targets = TargetColumns(
        mask_T=ones_T,
        weights_T=ones_T / 3,
        rows_T=rows_T,
        advantages_T=torch.randn(8, generator=rng, dtype=torch.float64)[rows_T],
        engine_logprobs_T=engine_T,
        lag_T=ones_T * 0,
    )
    logprobs_T.requires_grad_()
    result = policy_objective(rules, logprobs_T, ones_T, targets, load_loss(rules))
    result.total.backward()  # type: ignore[no-untyped-call]
    assert logprobs_T.grad is not None
    return result, logprobs_T.grad


@pytest.mark.parametrize(
    "rest",
    [{"old_policy": "engine"}, {"correction": {"kind": "tis"}}, {"kl": {}, "entropy_coefficient": 0.0}],
    ids=lambda rest: next(iter(rest)),
)
def test_a_loss_written_by_hand_has_the_numbers_of_the_one_built_in(rest: dict[str, Any]) -> None:
    clips = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}
    ours, expected_T = objective(algorithm(loss={"kind": "ppo_clip", **clips}, **rest))
    theirs, found_T = objective(algorithm(loss=custom("clipped", args={"clip": 0.3}), **rest))
    assert theirs.total.item() == pytest.approx(ours.total.item(), rel=1e-12)
    torch.testing.assert_close(found_T, expected_T)
    assert theirs.metrics["loss/ratio"].value.item() == pytest.approx(ours.metrics["ratio_mean"].value.item())


def test_a_class_is_made_once_with_its_args() -> None:
    rules = algorithm(loss=custom("RowMean", args={"factor": 2.0}))
    doubled, _ = objective(rules)
    plain, _ = objective(algorithm(loss=custom("RowMean")))
    assert doubled.total.item() == pytest.approx(2 * plain.total.item())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"summed gave a tensor of shape \(\) for 8 tokens; it must return one for each"),
        ("without_gradient", "without_gradient gave values without a gradient"),
        ("raising", "raising raised ZeroDivisionError: no luck"),
    ],
)
def test_a_loss_that_gives_something_else_is_told_so(name: str, message: str) -> None:
    with pytest.raises(CustomCodeError, match=message):
        objective(algorithm(loss=custom(name)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"import_path": f"{HERE}:cliped"}, "algorithm.loss.import_path: .* did you mean clipped"),
        ({"import_path": "no_such_module:f"}, "algorithm.loss.import_path: .*cannot be imported"),
        (custom("RowMean", args={"weight": 1}), "algorithm.loss.args: .* does not take them"),
    ],
)
def test_a_loss_that_is_not_there_is_an_error_of_the_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_loss(algorithm(loss={"kind": "custom", **settings}))


def estimate(rules: AlgorithmConfig) -> list[float]:
    scores = Scores(REWARDS_S, torch.full((6,), 4), GROUPS)
    return estimate_advantages(rules, scores, load_estimator(rules))[0].tolist()


def test_an_advantage_written_by_hand_has_the_numbers_of_the_one_built_in() -> None:
    expected = estimate(algorithm(advantage={"kind": "grpo", "normalize_std": False}))
    assert estimate(algorithm(advantage=custom("centred"))) == pytest.approx(expected)
    doubled = estimate(algorithm(advantage=custom("centred", args={"factor": 2.0})))
    assert doubled == pytest.approx([2 * each for each in expected])


def test_it_sees_one_group_at_a_time_unless_it_says_that_it_needs_all() -> None:
    assert estimate(algorithm(advantage=custom("group_count"))) == [1.0] * 6
    assert estimate(algorithm(advantage=custom("group_count", whole_batch=True))) == [2.0] * 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "too_few gave 2 for 3 samples; it must return one number for each"),
        ("not_finite", "not_finite gave nan for a sample with the reward 0; advantages must be finite"),
        ("not_numbers", "not_numbers gave a list; it must return a list of numbers"),
    ],
)
def test_an_advantage_that_gives_something_else_is_told_so(name: str, message: str) -> None:
    with pytest.raises(CustomCodeError, match=message):
        estimate(algorithm(advantage=custom(name)))


def problems(**settings: Any) -> list[str]:
    rollout = {"environment": {"kind": "reasoning_gym:chain_sum"}}
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"path": "m"}, "rollout": rollout, **settings}, "test")
    return caught.value.problems


def test_one_that_needs_the_whole_batch_refuses_to_stream() -> None:
    advantage = custom("centred", whole_batch=True)
    (line,) = problems(algorithm={"advantage": advantage})
    assert line.startswith("algorithm.advantage.kind: custom compares each sample with the whole step")
    parse_config(
        {
            "model": {"path": "m"},
            "rollout": {"environment": {"kind": "reasoning_gym:chain_sum"}},
            "algorithm": {"advantage": advantage},
            "training": {"prompt_groups_per_step": 4, "min_groups_per_chunk": 4},
        },
        "test",
    )


@pytest.mark.parametrize("section", ["loss", "advantage"])
@pytest.mark.parametrize("path", ["module", "a:b:c", ":b", "a:"])
def test_an_import_path_has_a_module_and_a_name(section: str, path: str) -> None:
    (line,) = problems(algorithm={section: {"kind": "custom", "import_path": path}})
    assert line.startswith(f"algorithm.{section}.import_path: ")
    assert "module:thing" in line

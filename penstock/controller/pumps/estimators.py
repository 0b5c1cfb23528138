"""From a chunk's rewards to its advantages, as `algorithm` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.advantages import (
    grpo_advantages,
    leave_one_out_advantages,
    max_normalized_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    whitened_advantages,
)
from penstock.algorithms.custom import AdvantageEstimator, SampleScores, custom_advantages
from penstock.algorithms.rewards import shape_rewards
from penstock.config.sections.algorithm import (
    AlgorithmConfig,
    BatchWhitenedAdvantage,
    CustomAdvantage,
    GrpoAdvantage,
    LeaveOneOutAdvantage,
    MaxNormalizedAdvantage,
    ReinforcePpAdvantage,
    ReinforcePpBaselineAdvantage,
    RlooAdvantage,
)
from penstock.imports import made_callable


@dataclass(frozen=True)
class Scores:
    """The small columns of a chunk's samples; `groups` lists the rows of each group."""

    rewards_S: Tensor
    """As shaped by `algorithm.reward`, in float64."""
    lengths_S: Tensor
    """Trained tokens: 0 for samples that are masked out."""
    groups: Sequence[Sequence[int]]
    kl_to_go_sum_S: Tensor | None = None
    kl_to_go_square_sum_S: Tensor | None = None

    @property
    def groups_S(self) -> Tensor:
        """The number of each sample's group."""
        group_S = torch.empty(len(self.rewards_S), dtype=torch.int64)
        for group, rows in enumerate(self.groups):
            group_S[list(rows)] = group
        return group_S


def shaped_rewards(
    algorithm: AlgorithmConfig, rewards_S: Tensor, lengths_S: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Rewards after scale and clip, and after the length penalty too; `longest` is the longest response."""
    reward = algorithm.reward
    judged_S = shape_rewards(
        rewards_S.to(torch.float64),
        lengths_S,
        scale=reward.scale,
        clip_low=reward.clip_low,
        clip_high=reward.clip_high,
    )
    if reward.overlong != "soft":
        return judged_S, judged_S
    shaped_S = shape_rewards(
        judged_S,
        lengths_S,
        overlong_limit=reward.overlong_limit or longest,
        overlong_buffer=reward.overlong_buffer or 0,
        overlong_penalty=reward.overlong_penalty,
    )
    return judged_S, shaped_S


def load_estimator(algorithm: AlgorithmConfig) -> AdvantageEstimator | None:
    """The user's own estimator, if the settings name one."""
    config = algorithm.advantage
    if not isinstance(config, CustomAdvantage):
        return None
    return made_callable(config.import_path, config.args, "algorithm.advantage")


def estimate_advantages(
    algorithm: AlgorithmConfig, scores: Scores, custom: AdvantageEstimator | None = None
) -> tuple[Tensor, float]:
    """`(advantages_S, kl_weight)`: `kl_weight` is what trainer ranks multiply the KL to go by, if it is in the reward.

    `custom` is what `load_estimator` returns.
    """
    config, rewards_S = algorithm.advantage, scores.rewards_S
    if isinstance(config, CustomAdvantage):
        assert custom is not None
        return _custom(config, scores, custom), algorithm.kl.coefficient
    if isinstance(config, ReinforcePpAdvantage):
        return _reinforce_pp(algorithm, config, scores)
    if isinstance(config, ReinforcePpBaselineAdvantage):
        advantages_S = reinforce_pp_baseline_advantages(
            rewards_S, scores.groups_S, scores.lengths_S, epsilon=config.epsilon
        )
    elif isinstance(config, BatchWhitenedAdvantage):
        advantages_S = whitened_advantages(rewards_S, (scores.lengths_S > 0).double(), epsilon=config.epsilon)
    else:
        advantages_S = torch.empty_like(rewards_S)
        for rows in scores.groups:
            advantages_S[list(rows)] = _within_group(algorithm, rewards_S[list(rows)])
    return advantages_S, algorithm.kl.coefficient


def _custom(config: CustomAdvantage, scores: Scores, custom: AdvantageEstimator) -> Tensor:
    """One group at a time, so that a streaming estimator cannot see more; all at once if it asks for that."""
    groups_S, path = scores.groups_S, config.import_path

    def of(rows: list[int]) -> Tensor:
        lengths = scores.lengths_S[rows].double()
        groups = groups_S[rows] if config.whole_batch else torch.zeros(len(rows), dtype=torch.int64)
        return custom_advantages(custom, SampleScores(scores.rewards_S[rows].double(), lengths, groups), path)

    advantages_S = torch.empty_like(scores.rewards_S)
    for rows in [range(len(groups_S))] if config.whole_batch else scores.groups:
        advantages_S[list(rows)] = of(list(rows)).to(advantages_S.dtype)
    return advantages_S


def _within_group(algorithm: AlgorithmConfig, rewards_G: Tensor) -> Tensor:
    """The advantages of one group; these estimators stream."""
    config = algorithm.advantage
    if isinstance(config, GrpoAdvantage):
        return grpo_advantages(rewards_G, normalize_std=config.normalize_std, epsilon=config.epsilon)
    if isinstance(config, RlooAdvantage):
        return rloo_advantages(rewards_G)
    if isinstance(config, LeaveOneOutAdvantage):
        return leave_one_out_advantages(rewards_G, epsilon=config.epsilon)
    if isinstance(config, MaxNormalizedAdvantage):
        return max_normalized_advantages(rewards_G, epsilon=config.epsilon)
    return rewards_G


def _reinforce_pp(algorithm: AlgorithmConfig, config: ReinforcePpAdvantage, scores: Scores) -> tuple[Tensor, float]:
    none_S = torch.zeros_like(scores.rewards_S)
    in_reward = scores.kl_to_go_sum_S is not None
    advantages_S, kl_weight = reinforce_pp_advantages(
        scores.rewards_S,
        scores.lengths_S,
        none_S if scores.kl_to_go_sum_S is None else scores.kl_to_go_sum_S,
        none_S if scores.kl_to_go_square_sum_S is None else scores.kl_to_go_square_sum_S,
        kl_coefficient=algorithm.kl.coefficient if in_reward else 0.0,
        epsilon=config.epsilon,
    )
    return advantages_S, float(kl_weight)

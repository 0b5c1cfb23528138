"""Losses and advantages of a user's own, good and bad."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.algorithms.custom import LossTokens, SampleScores
from penstock.algorithms.rows import dense_rows, row_totals


def clipped(tokens: LossTokens, clip: float = 0.2) -> tuple[Tensor, Mapping[str, Tensor]]:
    """`ppo_clip` with one clip, and a number to record."""
    ratio_T = (tokens.logprobs_T - tokens.old_logprobs_T).exp()
    low_T, high_T = ratio_T * tokens.advantages_T, ratio_T.clamp(1 - clip, 1 + clip) * tokens.advantages_T
    return -torch.minimum(low_T, high_T), {"ratio": ratio_T}


class RowMean:
    """A loss of whole responses: the log-prob of a response times its advantage."""

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def __call__(self, tokens: LossTokens) -> Tensor:
        rows_T = dense_rows(tokens.rows_T)
        length_T = row_totals(torch.ones_like(tokens.logprobs_T), rows_T)
        return -self._factor * tokens.advantages_T * row_totals(tokens.logprobs_T, rows_T) / length_T


def over_the_batch(tokens: LossTokens) -> Tensor:
    """Advantages are centred over whatever shares the microbatch: wrong."""
    return -(tokens.advantages_T - tokens.advantages_T.mean()) * tokens.logprobs_T


def summed(tokens: LossTokens) -> Tensor:
    return -(tokens.advantages_T * tokens.logprobs_T).sum()


def without_gradient(tokens: LossTokens) -> Tensor:
    return -tokens.advantages_T * tokens.logprobs_T.detach()


def raising(tokens: LossTokens) -> Tensor:
    raise ZeroDivisionError("no luck")


def raising_advantage(scores: SampleScores) -> Tensor:
    raise ZeroDivisionError("no luck either")


def centred(scores: SampleScores, factor: float = 1.0) -> Tensor:
    """Dr. GRPO's, by hand."""
    return factor * (scores.rewards_S - scores.rewards_S.mean())


def group_count(scores: SampleScores) -> list[float]:
    """How many groups it was shown, for every sample."""
    return [float(len(scores.groups_S.unique()))] * len(scores.rewards_S)


def too_few(scores: SampleScores) -> Tensor:
    return scores.rewards_S[1:]


def not_finite(scores: SampleScores) -> Tensor:
    return scores.rewards_S / 0.0


def not_numbers(scores: SampleScores) -> list[str]:
    return ["good"] * len(scores.rewards_S)

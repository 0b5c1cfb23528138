"""Advantages: how good a sample was, compared with the other samples of its prompt group or of its batch.

In functions of a group the last axis is the group and leading axes, if any, are separate groups; `S` runs over all
samples of a batch. Everything is computed in float64 and returned in the dtype of the rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.algorithms.rows import dense_rows, row_totals


def grpo_advantages(rewards_G: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Group-relative advantages: reward minus the group's mean, optionally over the group's standard deviation.

    The deviation is the sample one (divisor G - 1) and `epsilon` is added to it, as in TRL and verl; the paper (Shao et
    al., 2024) leaves both open. Without the deviation, this is the advantage of Dr. GRPO (Liu et al., 2025).

    Invariants: a group without spread gets exact zeros even if its mean is rounded; so does a group of one.
    """
    exact_G = rewards_G.to(torch.float64)
    centred_G = exact_G - exact_G.mean(-1, keepdim=True)
    if normalize_std and rewards_G.shape[-1] > 1:
        centred_G = centred_G / (exact_G.std(-1, correction=1, keepdim=True) + epsilon)
    return _zero_where_flat(centred_G, exact_G).to(rewards_G.dtype)


def rloo_advantages(rewards_G: Tensor) -> Tensor:
    """Reward minus the mean of the other samples of the group (RLOO, Ahmadian et al., 2024).

    The baseline does not depend on the sample it is subtracted from, so the policy gradient stays unbiased. Equal to
    G / (G - 1) times the reward minus the group's mean. Exact zeros without spread and for a group of one.
    """
    exact_G = rewards_G.to(torch.float64)
    others = max(rewards_G.shape[-1] - 1, 1)
    advantages_G = exact_G - (exact_G.sum(-1, keepdim=True) - exact_G) / others
    return _zero_where_flat(advantages_G, exact_G).to(rewards_G.dtype)


def leave_one_out_advantages(rewards_G: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """Reward minus the mean of the others, over the standard deviation of the others (plus `epsilon`).

    Baseline and scale are both independent of the sample. The deviation is the sample one: divisor G - 2 for the G - 1
    others. If the others do not differ among themselves (the only success of a group, or a group of two), they give no
    scale and the difference stays undivided, as in RLOO; it is bounded by the range of the rewards.

    Exact zeros without spread and for a group of one.
    """
    size = rewards_G.shape[-1]
    exact_G = rewards_G.to(torch.float64)
    if size == 1:
        return torch.zeros_like(rewards_G)
    itself_GG = torch.eye(size, dtype=torch.bool, device=rewards_G.device)
    others_GG = exact_G.unsqueeze(-2).expand(*exact_G.shape, size)
    mean_G = others_GG.masked_fill(itself_GG, 0.0).sum(-1) / (size - 1)
    squares_GG = (others_GG - mean_G.unsqueeze(-1)).square().masked_fill(itself_GG, 0.0)
    std_G = (squares_GG.sum(-1) / max(size - 2, 1)).sqrt()
    lowest_G = others_GG.masked_fill(itself_GG, float("inf")).amin(-1)
    highest_G = others_GG.masked_fill(itself_GG, float("-inf")).amax(-1)
    scale_G = torch.where(lowest_G == highest_G, torch.ones_like(std_G), std_G + epsilon)
    return _zero_where_flat((exact_G - mean_G) / scale_G, exact_G).to(rewards_G.dtype)


def max_normalized_advantages(rewards_G: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Reward minus the group's mean, over the largest absolute deviation from it (plus `epsilon`): within [-1, 1].

    Exact zeros without spread and for a group of one.
    """
    exact_G = rewards_G.to(torch.float64)
    centred_G = exact_G - exact_G.mean(-1, keepdim=True)
    advantages_G = centred_G / (centred_G.abs().amax(-1, keepdim=True) + epsilon)
    return _zero_where_flat(advantages_G, exact_G).to(rewards_G.dtype)


def whitened_advantages(rewards_S: Tensor, weights_S: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """`(reward - mean) / (std + epsilon)` over the whole batch, mean and variance weighted by `weights_S`.

    With ones, every sample counts the same; with response lengths, every token does, and carries its sample's value. A
    sample of weight zero is ignored, even if it holds NaN, and gets zero. Exact zeros for a batch without spread.
    """
    advantages_S, _ = reinforce_pp_advantages(
        rewards_S,
        weights_S,
        torch.zeros_like(weights_S),
        torch.zeros_like(weights_S),
        kl_coefficient=0,
        epsilon=epsilon,
    )
    return advantages_S


def reinforce_pp_advantages(
    rewards_S: Tensor,
    lengths_S: Tensor,
    kl_to_go_sum_S: Tensor,
    kl_to_go_square_sum_S: Tensor,
    *,
    kl_coefficient: float,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu, 2025): token returns with the KL penalty in them, whitened over all tokens of the batch.

    Token t of sample s has the return `R_s - beta * K_t`, with K_t the sum of log p_old - log p_reference over t and
    the later tokens of its row, and the advantage `(R_s - beta * K_t - mean) / (std + epsilon)`, mean and population
    deviation over tokens. The sums of K_t and of K_t^2 over a sample's tokens fix both exactly.

    Returns the per-sample part `(R_s - mean) / (std + epsilon)` and a scalar tensor `beta / (std + epsilon)`: a token's
    advantage is the first minus the second times its K_t.

    A sample without tokens is ignored, even if it holds NaN, and gets zero. Both parts are exact zeros if all returns
    are equal because all rewards are equal and the KL sums are zero.
    """
    lengths_S = lengths_S.to(torch.float64)
    inside_S = lengths_S > 0

    def exact(values_S: Tensor) -> Tensor:
        return values_S.to(torch.float64).masked_fill(~inside_S, 0.0)

    exact_S = exact(rewards_S)
    kl_sum_S = kl_coefficient * exact(kl_to_go_sum_S)
    kl_square_sum_S = kl_coefficient**2 * exact(kl_to_go_square_sum_S)
    tokens = lengths_S.sum().clamp(min=torch.finfo(torch.float64).tiny)
    centred_S = exact_S - (lengths_S * exact_S - kl_sum_S).sum() / tokens
    squares_S = lengths_S * centred_S.square() - 2 * centred_S * kl_sum_S + kl_square_sum_S
    std = (squares_S.sum() / tokens).clamp(min=0).sqrt()
    lowest = exact_S.masked_fill(~inside_S, float("inf")).amin()
    highest = exact_S.masked_fill(~inside_S, float("-inf")).amax()
    flat = (lowest >= highest) & (kl_square_sum_S == 0).all()
    advantages_S = (centred_S / (std + epsilon)).masked_fill(flat | ~inside_S, 0.0)
    kl_scale = (kl_coefficient / (std + epsilon)).masked_fill(flat, 0.0)
    return advantages_S.to(rewards_S.dtype), kl_scale


def reinforce_pp_baseline_advantages(
    rewards_S: Tensor, group_S: Tensor, lengths_S: Tensor, *, epsilon: float = 1e-8
) -> Tensor:
    """REINFORCE++-baseline (Hu, 2025): the group's mean is subtracted, the rest is whitened over all tokens.

    `group_S` tells groups apart by any integers. All samples of a group count towards its mean, including those without
    tokens, which get zero themselves. A batch in which no group has spread gets exact zeros; in any other batch, a
    group without spread gets the (small) shift of the whitening, because its samples' zero is not the mean over tokens.
    """
    dense_S = dense_rows(group_S)
    exact_S = rewards_S.to(torch.float64)
    mean_S = row_totals(exact_S, dense_S) / row_totals(torch.ones_like(exact_S), dense_S)
    lowest_S = exact_S.scatter_reduce(0, dense_S, exact_S, "amin", include_self=False)[dense_S]
    highest_S = exact_S.scatter_reduce(0, dense_S, exact_S, "amax", include_self=False)[dense_S]
    centred_S = (exact_S - mean_S).masked_fill(lowest_S == highest_S, 0.0)
    return whitened_advantages(centred_S, lengths_S, epsilon=epsilon).to(rewards_S.dtype)


def _zero_where_flat(advantages_G: Tensor, rewards_G: Tensor) -> Tensor:
    flat_1 = rewards_G.amax(-1, keepdim=True) == rewards_G.amin(-1, keepdim=True)
    return advantages_G.masked_fill(flat_1, 0.0)

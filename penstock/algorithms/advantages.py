"""Advantages: how good a sample was, compared with the other samples of its prompt group."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo_advantages(rewards_G: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Group-relative advantages: reward minus the group's mean, optionally over the group's standard deviation.

    The deviation is the sample one (divisor G - 1) and `epsilon` is added to it, as in TRL and verl; the paper leaves
    both open. The last axis is the group; leading axes, if any, are separate groups. Worked out in float64.

    Invariants: a group without spread gets exact zeros, whatever the rounding of its mean; so does a group of one.
    """
    exact_G = rewards_G.to(torch.float64)
    centred_G = exact_G - exact_G.mean(-1, keepdim=True)
    if normalize_std and rewards_G.shape[-1] > 1:
        centred_G = centred_G / (exact_G.std(-1, correction=1, keepdim=True) + epsilon)
    flat_1 = exact_G.amax(-1, keepdim=True) == exact_G.amin(-1, keepdim=True)
    return centred_G.masked_fill(flat_1, 0.0).to(rewards_G.dtype)

"""Small batches of flat tokens, and all policy losses behind one signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.algorithms.kl import KlEstimator, kl_loss
from penstock.algorithms.losses import (
    LossSum,
    cispo_loss,
    entropy_bonus,
    gspo_loss,
    ppo_clip_loss,
    reinforce_loss,
)

LOW, HIGH = 0.2, 0.3


@dataclass(frozen=True)
class Tokens:
    """One microbatch: rows of several tokens, an advantage per row, about a third of the tokens outside the mask."""

    logprobs_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    mask_T: Tensor
    rows_T: Tensor

    def pick(self, index_T: Tensor) -> Tokens:
        """Some of the tokens, or all in another order."""
        return Tokens(*(getattr(self, name)[index_T] for name in self.__dataclass_fields__))

    def at(self, logprobs_T: Tensor) -> Tokens:
        """The same tokens under other log-probs."""
        return replace(self, logprobs_T=logprobs_T)


Loss = Callable[[Tokens], LossSum]


def random_tokens(rows: int = 12, *, seed: int = 0, spread: float = 0.4, dtype: torch.dtype = torch.float64) -> Tokens:
    """Rows of 1 to 9 tokens with sequence-level weights; one row is outside the mask as a whole."""
    rng = torch.Generator().manual_seed(seed)
    lengths_R = torch.randint(1, 10, (rows,), generator=rng)
    rows_T = torch.arange(rows).repeat_interleave(lengths_R) * 7 - 20
    count = int(lengths_R.sum())
    old_T = -3 * torch.rand(count, generator=rng, dtype=dtype) - 0.1
    mask_T = ((torch.rand(count, generator=rng) > 0.3) & (rows_T != -20)).to(dtype)
    inside = {row: max(mask_T[rows_T == row].sum().item(), 1.0) for row in rows_T.unique().tolist()}
    return Tokens(
        logprobs_T=old_T + spread * torch.randn(count, generator=rng, dtype=dtype),
        old_T=old_T,
        advantages_T=torch.randn(rows, generator=rng, dtype=dtype).repeat_interleave(lengths_R),
        weights_T=mask_T / torch.tensor([inside[row] for row in rows_T.tolist()], dtype=dtype),
        mask_T=mask_T,
        rows_T=rows_T,
    )


def _ppo(tokens: Tokens, dual_clip: float | None) -> LossSum:
    return ppo_clip_loss(
        tokens.logprobs_T,
        tokens.old_T,
        tokens.advantages_T,
        tokens.weights_T,
        tokens.mask_T,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        dual_clip=dual_clip,
    )


def _gspo(tokens: Tokens) -> LossSum:
    return gspo_loss(
        tokens.logprobs_T,
        tokens.old_T,
        tokens.advantages_T,
        tokens.weights_T,
        tokens.mask_T,
        tokens.rows_T,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
    )


def _cispo(tokens: Tokens, clip_ratio_low: float | None) -> LossSum:
    return cispo_loss(
        tokens.logprobs_T,
        tokens.old_T,
        tokens.advantages_T,
        tokens.weights_T,
        tokens.mask_T,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=HIGH,
    )


def _reinforce(tokens: Tokens) -> LossSum:
    return reinforce_loss(tokens.logprobs_T, tokens.advantages_T, tokens.weights_T, tokens.mask_T)


def _kl(tokens: Tokens, estimator: KlEstimator) -> LossSum:
    return kl_loss(tokens.logprobs_T, tokens.old_T, tokens.weights_T, tokens.mask_T, estimator=estimator)


def _entropy(tokens: Tokens) -> LossSum:
    return entropy_bonus(tokens.logprobs_T, tokens.weights_T, tokens.mask_T)


LOSSES: dict[str, Loss] = {
    "ppo_clip": partial(_ppo, dual_clip=None),
    "dual_clip": partial(_ppo, dual_clip=1.6),
    "gspo": _gspo,
    "cispo": partial(_cispo, clip_ratio_low=None),
    "cispo_both": partial(_cispo, clip_ratio_low=LOW),
    "reinforce": _reinforce,
    "kl_k2": partial(_kl, estimator=KlEstimator.K2),
    "kl_k3": partial(_kl, estimator=KlEstimator.K3),
    "entropy": _entropy,
}


def gradient(loss: Loss, tokens: Tokens) -> Tensor:
    """The gradient of the loss's sum in the log-probs."""
    logprobs_T = tokens.logprobs_T.detach().clone().requires_grad_()
    (slopes_T,) = torch.autograd.grad(loss(tokens.at(logprobs_T)).total, logprobs_T)
    return slopes_T

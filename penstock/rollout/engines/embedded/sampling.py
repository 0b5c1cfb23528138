"""Drawing one token for every row of a batch at once.

A token is the inverse of the row's cumulative distribution at one uniform number, so a request's randomness is a plain
list of numbers that nothing else in the batch can touch. Every operation here works along single rows: a row's result
is bit-identical regardless of what the other rows hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BELOW_ONE = 1.0 - 2.0**-50
"""Keeps the largest uniform number below the end of the cumulative distribution after rounding."""


@dataclass(frozen=True)
class SamplingColumns:
    """How rows want their tokens drawn, one entry per row."""

    temperature_B: NDArray[np.float32]
    top_k_B: NDArray[np.int64]
    top_p_B: NDArray[np.float32]
    min_p_B: NDArray[np.float32]

    @property
    def truncated_B(self) -> NDArray[np.bool_]:
        """Rows that leave tokens out."""
        return (self.top_k_B > 0) | (self.top_p_B < 1.0) | (self.min_p_B > 0.0)


@dataclass(frozen=True)
class Truncation:
    """What rows leave out; one that does not ask for top-k, top-p or min-p has a bound that leaves out nothing."""

    top_k_R1: Tensor
    top_p_R1: Tensor
    log_min_p_R1: Tensor
    by_rank: bool
    """Whether a row uses top-k or top-p, for which tokens must be sorted."""


@dataclass(frozen=True)
class SamplingPlan:
    """What the rows ask for, made once per change of the batch; `None` if no row asks for it."""

    temperature_B1: Tensor | None
    greedy_B: Tensor | None
    truncated_R: Tensor | None
    """Rows that use min-p, top-k or top-p."""
    truncation: Truncation
    rows_R: tuple[int, ...] = ()
    """The same rows as `truncated_R`, on the host."""

    def part(self, rows: slice) -> Truncation:
        """What some of `truncated_R` leave out."""
        whole = self.truncation
        return Truncation(whole.top_k_R1[rows], whole.top_p_R1[rows], whole.log_min_p_R1[rows], whole.by_rank)


_NO_TRUNCATION = Truncation(
    torch.empty((0, 1), dtype=torch.int64), torch.empty((0, 1)), torch.empty((0, 1)), by_rank=False
)
_AS_THE_MODEL_SAYS = SamplingPlan(None, None, None, _NO_TRUNCATION)
"""The plan when no row asks for anything, as in most batches; plans are needed whenever a row comes or goes."""


def plan_sampling(wanted: SamplingColumns, device: torch.device) -> SamplingPlan:
    """Greedy rows (temperature 0) are drawn under temperature 1 and without truncation."""
    truncated_B = wanted.truncated_B
    if (wanted.temperature_B == 1.0).all() and not truncated_B.any():
        return _AS_THE_MODEL_SAYS
    greedy_B = wanted.temperature_B == 0.0
    divisor_B = np.where(greedy_B, np.float32(1.0), wanted.temperature_B)
    truncated_R = np.flatnonzero(truncated_B & ~greedy_B)
    return SamplingPlan(
        temperature_B1=torch.from_numpy(divisor_B[:, None]).to(device) if (divisor_B != 1.0).any() else None,
        greedy_B=torch.from_numpy(greedy_B).to(device) if greedy_B.any() else None,
        truncated_R=torch.from_numpy(truncated_R).to(device) if len(truncated_R) else None,
        truncation=_plan_truncation(wanted, truncated_R, device) if len(truncated_R) else _NO_TRUNCATION,
        rows_R=tuple(truncated_R.tolist()),
    )


def _plan_truncation(wanted: SamplingColumns, rows_R: NDArray[np.int64], device: torch.device) -> Truncation:
    top_k_R, top_p_R = wanted.top_k_B[rows_R], wanted.top_p_B[rows_R]
    by_rank = bool(((top_k_R > 0) | (top_p_R < 1.0)).any())
    top_k_R = np.where(top_k_R > 0, top_k_R, np.iinfo(np.int64).max)
    # Above 1 nothing is cut: the cumulative sum of a whole row may pass 1 by rounding.
    top_p_R = np.where(top_p_R < 1.0, top_p_R, np.float32(2.0))
    with np.errstate(divide="ignore"):
        log_min_p_R = np.log(wanted.min_p_B[rows_R])
    top_k_R1, top_p_R1, log_min_p_R1 = (
        torch.from_numpy(column_R[:, None]).to(device) for column_R in (top_k_R, top_p_R, log_min_p_R)
    )
    return Truncation(top_k_R1, top_p_R1, log_min_p_R1, by_rank)


def truncate(logits_RV: Tensor, bounds: Truncation) -> Tensor:
    """The logits, with -inf for every token that is left out.

    First min-p: tokens whose probability is below that fraction of the largest one go. Then, of the remaining
    distribution, the `top_k` likeliest tokens stay, and among these the fewest that reach `top_p`.
    """
    # A row without min-p has the bound -inf, below which nothing is.
    floor_R1 = logits_RV.amax(-1, keepdim=True) + bounds.log_min_p_R1
    logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, -torch.inf)
    if not bounds.by_rank:
        return logits_RV
    sorted_RV, order_RV = torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= bounds.top_k_R1, -torch.inf)
    probs_RV = sorted_RV.softmax(-1)
    mass_before_RV = probs_RV.cumsum(-1) - probs_RV
    beyond_RV = (mass_before_RV >= bounds.top_p_R1) & (rank_V > 0)
    sorted_RV = sorted_RV.masked_fill(beyond_RV, -torch.inf)
    return torch.empty_like(logits_RV).scatter_(-1, order_RV, sorted_RV)


KeptIds = Mapping[int, NDArray[np.int32]]
"""For the rows whose distribution was truncated: the token ids that remained, in ascending order."""


def sample(
    logits_BV: Tensor, uniforms_B: Tensor, plan: SamplingPlan
) -> tuple[NDArray[np.int64], NDArray[np.float64], KeptIds]:
    """One token per row, its probability under the distribution it was drawn from, and what truncation left of that.

    `logits_BV` (float32) may be overwritten.
    """
    kept: KeptIds = {}
    likeliest_B = logits_BV.argmax(-1) if plan.greedy_B is not None else None
    if plan.temperature_B1 is not None:
        logits_BV = logits_BV / plan.temperature_B1
    if plan.truncated_R is not None:
        truncated_RV = truncate(logits_BV[plan.truncated_R], plan.truncation)
        logits_BV[plan.truncated_R] = truncated_RV
        kept_RV = (truncated_RV > -torch.inf).cpu().numpy()
        kept = {row: np.flatnonzero(kept_V).astype(np.int32) for row, kept_V in zip(plan.rows_R, kept_RV, strict=True)}
    probs_BV = logits_BV.softmax(-1)
    # In float64 the sum neither loses the many unlikely tokens of a large vocabulary nor stops rising.
    cdf_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniforms_B * cdf_BV[:, -1]).mul_(_BELOW_ONE).unsqueeze(-1)
    token_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    if plan.greedy_B is not None and likeliest_B is not None:
        token_B1 = torch.where(plan.greedy_B.unsqueeze(-1), likeliest_B.unsqueeze(-1), token_B1)
    return *_to_host(token_B1, probs_BV.gather(-1, token_B1)), kept


def _to_host(token_B1: Tensor, prob_B1: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if token_B1.device.type == "cpu":
        return token_B1.numpy()[:, 0], prob_B1.numpy()[:, 0].astype(np.float64)
    drawn_B2 = torch.cat((token_B1.double(), prob_B1.double()), dim=1).cpu().numpy()  # packed, for one transfer
    return drawn_B2[:, 0].astype(np.int64), drawn_B2[:, 1]

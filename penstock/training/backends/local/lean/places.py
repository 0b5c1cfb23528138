"""Which tokens of a rectangle are computed: padding never, and prefixes that rows share only once.

The responses of a group share their prompt. A hidden state depends only on the tokens up to it, so rows that begin
alike have the same states there, no matter what follows; everything but attention processes those tokens once.
Attention sees whole rows.

Axes: B rows, L length of the longest, W places (`B * L`), T tokens that are computed, N predictions, A anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Between the places of `[B, L]` rows and the tokens that are computed for them.

    Invariants: every token has its own place, the first token the first place; the places of a row that are computed in
    another are its first ones; places that no prediction needs take the first token's states, and their gradients are
    0.
    """

    rows: int
    """B."""
    length: int
    """L."""
    place_T: Tensor
    """The place that each token was taken from."""
    token_W: Tensor
    """The token that stands for each place."""

    @classmethod
    def of(cls, ids_BL: Tensor, predictors_N: Tensor) -> Places:
        """What predictions at these places of the flattened rows need; rows that begin alike are neighbours."""
        rows, length = ids_BL.shape
        predicts_BL = torch.zeros(ids_BL.shape, dtype=torch.bool)
        predicts_BL.view(-1)[predictors_N] = True
        predicts_BL[0, 0] = True
        needed_BL = predicts_BL.flip(1).cummax(1).values.flip(1)
        same_BL = torch.zeros_like(needed_BL)
        torch.logical_and(ids_BL[1:] == ids_BL[:-1], needed_BL[1:] & needed_BL[:-1], out=same_BL[1:])
        shared_BL = same_BL.cummin(1).values
        owner_BL = torch.arange(rows)[:, None].masked_fill(shared_BL, 0).cummax(0).values
        own_W = (needed_BL & ~shared_BL).flatten()
        number_W = own_W.cumsum(0).sub_(1)
        places_BL = (owner_BL * length + torch.arange(length)).mul_(needed_BL)
        return cls(rows, length, own_W.nonzero()[:, 0], number_W[places_BL.flatten()])

    def spread(self, states_TA: Tensor) -> Tensor:
        """The states of all places, `[W, A]`."""
        return states_TA.index_select(0, self.token_W)

    def summed(self, grad_WA: Tensor) -> Tensor:
        """The gradient of `spread`."""
        return grad_WA.new_zeros(len(self.place_T), grad_WA.shape[1]).index_add_(0, self.token_W, grad_WA)

    def taken(self, states_WA: Tensor) -> Tensor:
        """Each token's states, from its own place."""
        return states_WA.index_select(0, self.place_T)

    def put_back(self, grad_TA: Tensor) -> Tensor:
        """The gradient of `taken`."""
        return grad_TA.new_zeros(len(self.token_W), grad_TA.shape[1]).index_copy_(0, self.place_T, grad_TA)

"""Sums over the tokens of a row (one response), for tokens that lie flat and in any order, without a loop over rows.

Nothing here waits for the device: sizes follow from the number of tokens alone, never from how many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_rows(rows_T: Tensor) -> Tensor:
    """Any integers that tell rows apart, as numbers 0, 1, 2, ... in the order of those integers."""
    order_T = torch.argsort(rows_T, stable=True)
    sorted_T = rows_T[order_T]
    changes_T = torch.zeros_like(rows_T, dtype=torch.int64)
    changes_T[1:] = (sorted_T[1:] != sorted_T[:-1]).to(torch.int64)
    return torch.empty_like(changes_T).scatter_(0, order_T, changes_T.cumsum(0))


def row_totals(values_T: Tensor, dense_rows_T: Tensor) -> Tensor:
    """For each token, the sum of `values_T` over all tokens of its row; differentiable.

    `dense_rows_T` is what `dense_rows` gives. A row's total does not depend on the other rows.
    """
    totals_T = torch.zeros_like(values_T).index_add(0, dense_rows_T, values_T)
    return totals_T[dense_rows_T]


def suffix_sums(values_T: Tensor, rows_T: Tensor) -> Tensor:
    """For each token, the sum over itself and the later tokens of its row, in float64.

    The tokens of a row are contiguous and in order. In round k a token takes in the sum that starts 2^k tokens after
    it, if that is still in its row, so log2(T) rounds are enough; no row's numbers enter another row's sums, not even
    as rounding.
    """
    sums_T = values_T.to(torch.float64)
    reach = 1
    while reach < values_T.shape[0]:
        same_row_T = rows_T[reach:] == rows_T[:-reach]
        later_T = torch.where(same_row_T, sums_T[reach:], torch.zeros_like(sums_T[reach:]))
        sums_T = torch.cat([sums_T[:-reach] + later_T, sums_T[-reach:]])
        reach *= 2
    return sums_T

"""The reference policy of a KL penalty, and what advantages need to know of the way to it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.algorithms.kl import KlEstimator, kl_estimate, kl_to_go
from penstock.data_plane import fields
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column
from penstock.training.batching import Rows

KL_INPUTS = (fields.INPUT_IDS, fields.TOKEN_MASK)
"""The columns that `kl_sums` reads."""


def kl_sums(batch: SampleBatch, logprobs_S: Tensor, reference_logprobs_S: Tensor) -> dict[str, Column]:
    """Each sample's sums, over its trained tokens, of the KL to go and of its square.

    From them the controller, which never sees tokens, gets mean and deviation of the per-token advantages exactly.
    """
    rows = Rows.of(batch)
    mask_S = batch.jagged(fields.TOKEN_MASK).values.cpu().to(torch.float64, copy=True)
    mask_S[rows.offsets_R1[:-1][rows.lengths_R > 0]] = 0  # a row's first token has no prediction
    kl_S = kl_estimate(logprobs_S, reference_logprobs_S, KlEstimator.K1).to(torch.float64) * mask_S
    to_go_S = kl_to_go(kl_S, rows.row_S) * mask_S

    def per_sample(values_S: Tensor) -> Tensor:
        return torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows.row_S, values_S)

    return {fields.KL_TO_GO_SUM: per_sample(to_go_S), fields.KL_TO_GO_SQUARE_SUM: per_sample(to_go_S.square())}

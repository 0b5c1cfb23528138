"""Log-prob passes without gradients, and the columns they add to rows before scoring and training."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.algorithms.kl import KlEstimator, kl_estimate, kl_to_go
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.training import TrainingConfig
from penstock.data_plane import fields
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn
from penstock.training.backends.base import Backend, MicrobatchRows
from penstock.training.batching import ChunkTokens
from penstock.training.packing import Plan
from penstock.training.targets import needs_kl_sums, uses_reference

PREPARED_FROM = (fields.INPUT_IDS, fields.TOKEN_MASK)
"""The columns that `LogprobPasses.added_columns` reads."""


class LogprobPasses:
    """Runs a backend's model over the microbatches of a plan, without gradients; keeps no state of a step."""

    def __init__(self, backend: Backend, training: TrainingConfig) -> None:
        self._backend = backend
        self._training = training

    def logprobs(self, rows: ChunkTokens, plan: Plan, *, reference: bool = False) -> Tensor:
        """Log-probs of all tokens of the plan's rows; 0 for each row's first token."""
        logprobs_S = torch.zeros(rows.ids_S.shape[0], dtype=self._backend.logprob_dtype)
        microbatches = [MicrobatchRows.of(rows, indices) for indices in plan]
        for done in self._backend.run(microbatches, None, reference=reference):
            logprobs_S[done.sources_T] = done.logprobs_T.cpu()
        return logprobs_S

    def added_columns(self, batch: SampleBatch, plan: Plan, algorithm: AlgorithmConfig) -> dict[str, Column]:
        """The old policy's log-probs if a step has several updates, the reference's if there is a KL penalty."""
        rows, columns = ChunkTokens.of(batch), dict[str, Column]()
        several, sums = self._training.minibatches_per_step > 1, needs_kl_sums(algorithm)
        current_S = self.logprobs(rows, plan) if several or sums else torch.empty(0)
        if several:
            columns[fields.OLD_LOGPROBS] = JaggedColumn(current_S, rows.offsets_R1)
        if uses_reference(algorithm):
            reference_S = self.logprobs(rows, plan, reference=True)
            columns[fields.REFERENCE_LOGPROBS] = JaggedColumn(reference_S, rows.offsets_R1)
            if sums:
                columns |= kl_sums(batch, current_S, reference_S)
        return columns


def kl_sums(batch: SampleBatch, logprobs_S: Tensor, reference_logprobs_S: Tensor) -> dict[str, Column]:
    """Each sample's sums, over its trained tokens, of the KL to go and of its square.

    From them the controller, which never sees tokens, gets mean and deviation of the per-token advantages exactly.
    """
    rows = ChunkTokens.of(batch)
    mask_S = batch.jagged(fields.TOKEN_MASK).values.cpu().to(torch.float64, copy=True)
    mask_S[rows.offsets_R1[:-1][rows.lengths_R > 0]] = 0  # a row's first token has no prediction
    kl_S = kl_estimate(logprobs_S, reference_logprobs_S, KlEstimator.K1).to(torch.float64) * mask_S
    to_go_S = kl_to_go(kl_S, rows.row_S) * mask_S

    def per_sample(values_S: Tensor) -> Tensor:
        return torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows.row_S, values_S)

    return {fields.KL_TO_GO_SUM: per_sample(to_go_S), fields.KL_TO_GO_SQUARE_SUM: per_sample(to_go_S.square())}

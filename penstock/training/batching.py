"""From rows of the data plane to the model's input, by index arithmetic; no loop over rows.

Axes: S, the stored tokens of a chunk, row after row; R, its rows; B and L, the model's input rectangle; T, the tokens
whose log-probs are wanted (targets). Token t of a row is predicted at place t - 1, so a row's first token is never a
target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import (
    ADVANTAGE,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    KEPT_COUNTS,
    KEPT_IDS,
    KL_WEIGHT,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKEN_VERSIONS,
)
from penstock.errors import DataPlaneError
from penstock.training.packing import Batching

IMPOSSIBLE = -1e15
"""The logit of a token that could not be drawn: its probability is exactly zero. The number is finite, and so are
products with it."""
_EXCLUDED_ELEMENTS = 2**24
"""How many logits are marked as possible or not at a time."""


@dataclass(frozen=True)
class KeptTokens:
    """The ids that truncated sampling kept for each of a chunk's tokens, `K` in all.

    Token s was drawn from `ids_K[starts_S1[s] : starts_S1[s + 1]]`; from the whole vocabulary if that is empty.
    """

    ids_K: Tensor
    starts_S1: Tensor

    def of(self, sources_T: Tensor) -> KeptTokens | None:
        """The share of the tokens at `sources_T`; None if all of them were drawn from the whole vocabulary."""
        counts_T = self.starts_S1.diff()[sources_T]
        starts_T1 = torch.nn.functional.pad(counts_T.cumsum(0), (1, 0))
        total = int(starts_T1[-1])
        if total == 0:
            return None
        token_K = torch.repeat_interleave(counts_T)
        place_K = torch.arange(total) - starts_T1[token_K] + self.starts_S1[sources_T][token_K]
        return KeptTokens(self.ids_K[place_K], starts_T1)

    def to(self, device: torch.device) -> KeptTokens:
        """The ids on the logits' device; the starts, which slice them, stay on the CPU."""
        return KeptTokens(self.ids_K.to(device), self.starts_S1)

    def exclude_(self, logits_CV: Tensor, first: int) -> Tensor:
        """Make all other tokens impossible in the logits of the tokens from `first` onwards, in place."""
        rows = max(1, _EXCLUDED_ELEMENTS // logits_CV.shape[1])
        for begin in range(0, logits_CV.shape[0], rows):
            part_CV = logits_CV[begin : begin + rows]
            starts_C1 = self.starts_S1[first + begin : first + begin + part_CV.shape[0] + 1]
            counts_C = starts_C1.diff()
            token_K = torch.repeat_interleave(counts_C).to(logits_CV.device)
            gone_CV = (counts_C > 0).to(logits_CV.device)[:, None].expand(part_CV.shape).clone()
            gone_CV[token_K, self.ids_K[int(starts_C1[0]) : int(starts_C1[-1])].long()] = False
            part_CV.masked_fill_(gone_CV, IMPOSSIBLE)
        return logits_CV


@dataclass(frozen=True)
class ChunkTokens:
    """Token ids of a chunk, where its rows begin, and what its tokens were drawn from."""

    ids_S: Tensor
    offsets_R1: Tensor
    kept: KeptTokens | None = None
    """Set if a token was drawn from less than the whole vocabulary."""

    @classmethod
    def of(cls, batch: SampleBatch) -> ChunkTokens:
        """The `input_ids` of fetched rows, with `KEPT_FIELDS` if the rows have them."""
        column = batch.jagged(INPUT_IDS)
        rows = cls(column.values.cpu(), column.offsets_R1)
        if KEPT_COUNTS not in batch.columns:
            return rows
        ids = batch.jagged(KEPT_IDS)
        starts_S1 = torch.nn.functional.pad(_aligned(batch, KEPT_COUNTS, rows).long().cumsum(0), (1, 0))
        if not torch.equal(starts_S1[rows.offsets_R1], ids.offsets_R1):
            raise DataPlaneError(f"{KEPT_IDS} has not as many ids in each row as {KEPT_COUNTS} says")
        return replace(rows, kept=KeptTokens(ids.values.cpu(), starts_S1)) if len(ids.values) else rows

    @property
    def lengths_R(self) -> Tensor:
        """Tokens of each row."""
        return self.offsets_R1.diff()

    @property
    def row_S(self) -> Tensor:
        """The row that each token belongs to."""
        return torch.repeat_interleave(self.lengths_R)


@dataclass(frozen=True)
class TrainColumns:
    """What the loss needs to know about each token and row, in float64 on the CPU.

    Invariants: a row's first token has mask 0; the masks sum to the chunk's valid tokens, the sequence weights (see
    `sequence_weights_S`) to its valid sequences.
    """

    mask_S: Tensor
    """Token mask times sample mask: how much a token counts."""
    sequence_weights_S: Tensor
    """The mask over its row's count of valid tokens: how much a token counts if every sequence weighs the same."""
    row_S: Tensor
    """The row of each token."""
    valid_R: Tensor
    """Valid sequences: the sample mask, 0 for rows without a valid token."""
    advantages_S: Tensor
    engine_logprobs_S: Tensor
    versions_S: Tensor
    reference_logprobs_S: Tensor | None = None
    """Where the rows have the column."""
    old_logprobs_S: Tensor | None = None
    """Where the rows have the column."""
    kl_weights_S: Tensor | None = None
    """Where the rows have the column."""
    extra_S: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the environment's own with a value per token, in their own dtypes."""
    extra_R: Mapping[str, Tensor] = field(default_factory=dict)
    """Columns of the environment's own with a value per row, in their own dtypes."""

    @classmethod
    def of(cls, batch: SampleBatch, rows: ChunkTokens, extra: Sequence[str] = ()) -> TrainColumns:
        """The training columns of fetched rows; `extra` names those of the environment's own."""
        row_S = rows.row_S
        token_mask_S = _aligned(batch, TOKEN_MASK, rows).to(torch.float64, copy=True)
        starts_R = rows.offsets_R1[:-1]
        token_mask_S[starts_R[rows.lengths_R > 0]] = 0
        sample_mask_R = _per_row(batch, SAMPLE_MASK)
        count_R = torch.zeros_like(sample_mask_R).index_add_(0, row_S, token_mask_S)
        mask_S = token_mask_S * sample_mask_R[row_S]
        return cls(
            mask_S=mask_S,
            sequence_weights_S=mask_S / count_R.clamp(min=torch.finfo(torch.float64).tiny)[row_S],
            row_S=row_S,
            valid_R=sample_mask_R.masked_fill(count_R == 0, 0.0),
            advantages_S=_per_row(batch, ADVANTAGE)[row_S],
            engine_logprobs_S=_aligned(batch, GENERATION_LOGPROBS, rows),
            versions_S=_aligned(batch, TOKEN_VERSIONS, rows),
            reference_logprobs_S=_aligned_if(batch, REFERENCE_LOGPROBS, rows),
            old_logprobs_S=_aligned_if(batch, OLD_LOGPROBS, rows),
            kl_weights_S=_per_row(batch, KL_WEIGHT)[row_S] if KL_WEIGHT in batch.columns else None,
            extra_S={name: _aligned(batch, name, rows) for name in extra if isinstance(batch[name], JaggedColumn)},
            extra_R={name: batch.tensor(name).cpu() for name in extra if isinstance(batch[name], Tensor)},
        )

    @property
    def valid_tokens(self) -> float:
        """This chunk's part of N for a loss with `token_mean`."""
        return float(self.mask_S.sum())

    @property
    def valid_sequences(self) -> float:
        """This chunk's part of N for a loss with `sequence_mean`."""
        return float(self.valid_R.sum())

    @property
    def trained_rows(self) -> list[int]:
        """Rows that have a valid token; the others need not go through the model."""
        indices: list[int] = self.valid_R.nonzero()[:, 0].tolist()
        return indices


@dataclass(frozen=True)
class Microbatch:
    """One forward pass: the model's input, and where in its output the targets' predictions are."""

    input_ids_BL: Tensor
    position_ids_BL: Tensor | None
    """Restarting at each document when packed; None for rows that all begin at 0."""
    predictors_T: Tensor
    """Places in the flattened `[B * L]` output that predict the targets."""
    sources_T: Tensor
    """Places in the chunk's `[S]` that hold the targets."""
    targets_T: Tensor
    """The targets' ids."""
    kept: KeptTokens | None = None
    """What the targets were drawn from, if that was less than the whole vocabulary."""

    def to(self, device: torch.device) -> Microbatch:
        """The model's input on its device; `sources_T` stays with the chunk's columns."""
        if device.type == "cpu":
            return self
        positions = None if self.position_ids_BL is None else self.position_ids_BL.to(device)
        return Microbatch(
            self.input_ids_BL.to(device),
            positions,
            self.predictors_T.to(device),
            self.sources_T,
            self.targets_T.to(device),
            None if self.kept is None else self.kept.to(device),
        )


def build_microbatch(
    rows: ChunkTokens, indices: Sequence[int], batching: Batching, wanted_S: Tensor | None = None
) -> Microbatch:
    """Lay the rows at `indices` out for the model.

    Padding is on the right, where a causal model cannot see it. Targets are the tokens that `wanted_S` marks, by
    default all; the first tokens of rows are excluded in either case.
    """
    index_M = torch.as_tensor(indices, dtype=torch.int64)
    lengths_M = rows.lengths_R[index_M]
    row_N = torch.repeat_interleave(lengths_M)
    before_M = lengths_M.cumsum(0) - lengths_M
    position_N = torch.arange(row_N.shape[0]) - before_M[row_N]
    source_N = rows.offsets_R1[index_M][row_N] + position_N
    ids_N = rows.ids_S[source_N]
    if batching is Batching.PACKED:
        place_N = torch.arange(row_N.shape[0])
        input_ids_BL, position_ids_BL = ids_N[None], position_N[None]
    else:
        width = int(lengths_M.max())
        place_N = row_N * width + position_N
        flat_BL = ids_N.new_zeros(len(indices) * width)
        flat_BL[place_N] = ids_N
        input_ids_BL, position_ids_BL = flat_BL.view(len(indices), width), None
    chosen_N = position_N > 0
    if wanted_S is not None:
        chosen_N &= wanted_S[source_N]
    sources_T = source_N[chosen_N]
    return Microbatch(
        input_ids_BL,
        position_ids_BL,
        place_N[chosen_N] - 1,
        sources_T,
        ids_N[chosen_N].to(torch.int64),
        None if rows.kept is None else rows.kept.of(sources_T),
    )


def _aligned(batch: SampleBatch, name: str, rows: ChunkTokens) -> Tensor:
    column = batch.jagged(name)
    if not torch.equal(column.offsets_R1, rows.offsets_R1):
        row = int((column.lengths_R != rows.lengths_R).nonzero()[0, 0])
        raise DataPlaneError(
            f"row {batch.sample_ids[row]!r}: {name} has {int(column.lengths_R[row])} tokens, {INPUT_IDS} has "
            f"{int(rows.lengths_R[row])}; per-token fields of a row must be equally long"
        )
    return column.values.cpu()


def _aligned_if(batch: SampleBatch, name: str, rows: ChunkTokens) -> Tensor | None:
    return _aligned(batch, name, rows) if name in batch.columns else None


def _per_row(batch: SampleBatch, name: str) -> Tensor:
    column = batch[name]
    if not isinstance(column, Tensor) or column.dim() != 1:
        raise DataPlaneError(f"field {name!r} must hold one number per row")
    return column.to(device="cpu", dtype=torch.float64)

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import JaggedColumn, materialize
from penstock.data_plane.fields import (
    ADVANTAGE,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKEN_VERSIONS,
)
from penstock.errors import DataPlaneError
from penstock.training.batching import ChunkTokens, TrainColumns, build_microbatch
from penstock.training.packing import Batching


def jagged(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> JaggedColumn:
    return JaggedColumn.from_rows([torch.tensor(row, dtype=dtype) for row in rows])


def batch(masks: list[list[float]], sample_mask: list[float]) -> SampleBatch:
    lengths = [len(mask) for mask in masks]
    ids = [[10.0 * row + token for token in range(length)] for row, length in enumerate(lengths, start=1)]
    return SampleBatch(
        tuple(f"p0_g{i}" for i in range(len(masks))),
        {
            INPUT_IDS: jagged(ids, torch.int64),
            TOKEN_MASK: jagged(masks),
            GENERATION_LOGPROBS: jagged([[-0.5] * length for length in lengths]),
            TOKEN_VERSIONS: jagged([[0.0] * length for length in lengths], torch.int32),
            SAMPLE_MASK: torch.tensor(sample_mask),
            ADVANTAGE: torch.arange(len(masks), dtype=torch.float32),
        },
    )


MASKS = [[0.0, 0, 1, 1], [1.0, 1], [0.0, 0, 0, 1, 0], [1.0, 0]]
"""Row 1's first token has mask 1 and row 3 has only such a token: neither can be predicted."""


def columns(sample_mask: list[float]) -> tuple[ChunkTokens, TrainColumns]:
    fetched = batch(MASKS, sample_mask)
    rows = ChunkTokens.of(fetched)
    return rows, TrainColumns.of(fetched, rows)


def test_tokens_and_sequences_are_counted_on_the_shifted_mask_times_the_sample_mask() -> None:
    _, train = columns([1, 1, 1, 1])
    assert (train.valid_tokens, train.valid_sequences) == (4, 3)
    assert train.trained_rows == [0, 1, 2]
    _, train = columns([0, 1, 1, 1])
    assert (train.valid_tokens, train.valid_sequences) == (2, 2)
    assert train.trained_rows == [1, 2]


def test_counting_does_not_change_the_stored_mask() -> None:
    fetched = batch(MASKS, [1, 1, 1, 1])
    column = JaggedColumn(fetched.jagged(TOKEN_MASK).values.double(), fetched.jagged(TOKEN_MASK).offsets_R1)
    fetched = SampleBatch(fetched.sample_ids, {**fetched.columns, TOKEN_MASK: column})
    before = column.values.clone()
    TrainColumns.of(fetched, ChunkTokens.of(fetched))
    assert torch.equal(column.values, before)


def test_sequence_weights_of_a_row_sum_to_its_sample_mask() -> None:
    rows, train = columns([1, 0, 1, 1])
    sums_R = torch.zeros(4, dtype=torch.float64).index_add_(0, rows.row_S, train.sequence_weights_S)
    assert sums_R.tolist() == [1, 0, 1, 0]


def test_padded_rows_lie_side_by_side_and_predictors_precede_targets() -> None:
    rows, train = columns([1, 1, 1, 1])
    microbatch = build_microbatch(rows, [0, 2], Batching.PADDED, train.mask_S > 0)
    assert microbatch.input_ids_BL.tolist() == [[10, 11, 12, 13, 0], [30, 31, 32, 33, 34]]
    assert microbatch.position_ids_BL is None
    assert microbatch.predictors_T.tolist() == [1, 2, 7]
    assert microbatch.targets_T.tolist() == [12, 13, 33]
    assert rows.ids_S[microbatch.sources_T].tolist() == [12, 13, 33]


def test_packed_positions_restart_and_no_row_predicts_the_next_ones_first_token() -> None:
    rows, _ = columns([1, 1, 1, 1])
    microbatch = build_microbatch(rows, [1, 0], Batching.PACKED)
    assert microbatch.input_ids_BL.tolist() == [[20, 21, 10, 11, 12, 13]]
    assert microbatch.position_ids_BL is not None
    assert microbatch.position_ids_BL.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert microbatch.targets_T.tolist() == [21, 11, 12, 13]
    assert microbatch.predictors_T.tolist() == [0, 2, 3, 4]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from(list(Batching)), st.randoms())
def test_every_target_stands_right_after_its_predictor(lengths: list[int], batching: Batching, random) -> None:  # type: ignore[no-untyped-def]
    column = JaggedColumn.from_rows([100 * row + torch.arange(length) for row, length in enumerate(lengths)])
    rows = ChunkTokens(column.values, column.offsets_R1)
    indices = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    microbatch = build_microbatch(rows, indices, batching)
    flat = microbatch.input_ids_BL.flatten()
    assert torch.equal(flat[microbatch.predictors_T] + 1, microbatch.targets_T)
    assert len(microbatch.targets_T) == sum(lengths[i] - 1 for i in indices)
    if batching is Batching.PADDED:
        assert torch.equal(microbatch.input_ids_BL, materialize(column.take(indices)))


def test_fields_of_different_lengths_are_refused_by_name() -> None:
    fetched = batch(MASKS, [1, 1, 1, 1])
    short = JaggedColumn.from_rows([torch.zeros(n) for n in (4, 2, 4, 2)])
    fetched = SampleBatch(fetched.sample_ids, {**fetched.columns, GENERATION_LOGPROBS: short})
    with pytest.raises(DataPlaneError, match="'p0_g2': generation_logprobs has 4 tokens, input_ids has 5"):
        TrainColumns.of(fetched, ChunkTokens.of(fetched))

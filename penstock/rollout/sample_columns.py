"""From trajectories to rows of the data plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data_plane import fields
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.errors import EnvironmentFailure
from penstock.rollout.environments.base import Trajectory


def group_columns(trajectories: Sequence[Trajectory]) -> dict[str, Column]:
    """The columns of a group, one row per trajectory. Token ids are concatenated unchanged, never re-tokenised."""
    rows = [_token_arrays(trajectory) for trajectory in trajectories]
    offsets_R1 = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(row[0]) for row in rows]), 0, out=offsets_R1[1:])

    def jagged(place: int) -> JaggedColumn:
        return JaggedColumn(torch.from_numpy(np.concatenate([row[place] for row in rows])), offsets_R1)

    kept = [_kept_arrays(trajectory) for trajectory in trajectories]

    return {
        fields.INPUT_IDS: jagged(0),
        fields.TOKEN_MASK: jagged(1),
        fields.GENERATION_LOGPROBS: jagged(2),
        fields.TOKEN_VERSIONS: jagged(3),
        fields.KEPT_COUNTS: JaggedColumn(torch.from_numpy(np.concatenate([counts for counts, _ in kept])), offsets_R1),
        fields.KEPT_IDS: JaggedColumn.from_rows([torch.from_numpy(ids) for _, ids in kept]),
        fields.REWARD: torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        fields.SAMPLE_MASK: torch.ones(len(rows), dtype=torch.float32),
        fields.RESPONSE_LENGTH: torch.tensor([int(row[1].sum()) for row in rows], dtype=torch.int64),
        fields.TRUNCATED: torch.tensor([t.truncated for t in trajectories], dtype=torch.bool),
        fields.RESPONSE_TEXT: ObjectColumn(tuple(t.response_text for t in trajectories)),
    }


def valid_tokens(columns: Mapping[str, Column]) -> list[int]:
    """How many tokens of each row are trained; a row's first token, which nothing predicts, is not."""
    mask, sample_mask_R = columns[fields.TOKEN_MASK], columns[fields.SAMPLE_MASK]
    assert isinstance(mask, JaggedColumn)
    assert isinstance(sample_mask_R, Tensor)
    trained_S = mask.values.cpu() > 0
    trained_S[mask.offsets_R1[:-1][mask.lengths_R > 0]] = False
    before_S1 = torch.nn.functional.pad(trained_S.long().cumsum(0), (1, 0))
    counts_R = before_S1[mask.offsets_R1].diff() * (sample_mask_R.cpu() > 0)
    found: list[int] = counts_R.tolist()
    return found


def prompt_ids(input_ids_T: Tensor, token_mask_T: Tensor) -> tuple[int, ...]:
    """What the model was asked first: a row's tokens before the first that it generated."""
    length = int((token_mask_T > 0).int().argmax())
    return tuple(input_ids_T[:length].tolist())


def _token_arrays(trajectory: Trajectory) -> tuple[Any, Any, Any, Any]:
    ids: list[int] = []
    mask: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for segment in trajectory.segments:
        ids += segment.token_ids
        count = len(segment.token_ids)
        generation = segment.generation
        if generation is None:
            mask += [0.0] * count
            logprobs += [0.0] * count
            versions += [-1] * count
        elif not count == len(generation.logprobs) == len(generation.token_versions):
            raise EnvironmentFailure(
                f"a segment of {count} tokens belongs to a generation of {len(generation.token_ids)}"
            )
        else:
            mask += [1.0] * count
            logprobs += generation.logprobs
            versions += generation.token_versions
    if not any(mask):
        raise EnvironmentFailure("the environment returned a trajectory without a token that the model generated")
    return (
        np.array(ids, dtype=np.int64),
        np.array(mask, dtype=np.float32),
        np.array(logprobs, dtype=np.float32),
        np.array(versions, dtype=np.int32),
    )


def _kept_arrays(trajectory: Trajectory) -> tuple[Any, Any]:
    """What remained of each token's distribution: how many token ids, and which, token after token."""
    counts: list[int] = []
    ids: list[Any] = [np.empty(0, dtype=np.int32)]
    for segment in trajectory.segments:
        kept = () if segment.generation is None else segment.generation.kept_ids
        if kept and len(kept) != len(segment.token_ids):
            raise EnvironmentFailure(
                f"a segment of {len(segment.token_ids)} tokens belongs to a generation that says of {len(kept)} what "
                "they were drawn from"
            )
        counts += [len(each) for each in kept] if kept else [0] * len(segment.token_ids)
        ids += kept
    return np.array(counts, dtype=np.int32), np.concatenate(ids)

"""Rows of a group for your own loop: what `RolloutManager` and the advantage pump write in a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.environments.base import Segment, Trajectory
from penstock.rollout.manager import PARTITION
from penstock.rollout.sample_columns import group_columns, valid_tokens


async def put_group(
    data_plane: DataPlaneClient,
    group_id: str,
    prompt_ids: Sequence[int],
    responses: Sequence[GenerationResult],
    rewards_G: Sequence[float] | Tensor,
    advantages_G: Sequence[float] | Tensor,
) -> KVBatchMeta:
    """Write one prompt and the G responses to it into the data plane, ready to train.

    The result is what `LocalTrainer.train_microbatch` takes; the rows stay until `clear_samples_async` with its
    `sample_ids` and `partition_id`. `group_id` must be new among the existing rows.
    """
    rewards, advantages = [float(each) for each in rewards_G], [float(each) for each in advantages_G]
    if not len(responses) == len(rewards) == len(advantages):
        raise DataPlaneError(
            f"group {group_id}: {len(responses)} responses with {len(rewards)} rewards and {len(advantages)} advantages"
        )
    prompt = Segment(tuple(prompt_ids))
    columns = group_columns(
        [
            Trajectory((prompt, Segment(response.token_ids, response)), reward, "")
            for response, reward in zip(responses, rewards, strict=True)
        ]
    )
    reward_column, input_ids = columns[fields.REWARD], columns[fields.INPUT_IDS]
    assert isinstance(reward_column, Tensor)
    assert isinstance(input_ids, JaggedColumn)
    columns[fields.ADVANTAGE] = reward_column.new_tensor(advantages)
    sample_ids = tuple(fields.sample_id(group_id, index) for index in range(len(responses)))
    data_plane.register_partition(PARTITION, fields.ROW_SCHEMA)
    await data_plane.put_samples_async(sample_ids, columns, PARTITION)
    meta = KVBatchMeta(PARTITION, sample_ids, frozenset(columns), tuple(input_ids.lengths_R.tolist()))
    return meta.tag_rows(fields.VALID_TOKENS, valid_tokens(columns))

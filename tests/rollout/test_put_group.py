"""Rows of a loop of one's own, and the parts that are made from a model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock
from penstock.data_plane import fields
from penstock.errors import DataPlaneError
from penstock.rollout.engines.base import FinishReason
from tests.support.tiny_models import save_tiny_model

RESPONSES = [
    penstock.GenerationResult("a", (7, 8), (-0.5, -0.25), (3, 4), FinishReason.STOP),
    penstock.GenerationResult("b", (9,), (-1.0,), (4,), FinishReason.LENGTH),
]


async def test_rows_hold_the_engine_s_own_tokens_with_rewards_and_advantages() -> None:
    plane = penstock.MemoryDataPlane()
    meta = await penstock.put_group(plane, "g", (5, 6), RESPONSES, [1.0, 0.0], torch.tensor([0.5, -0.5]))
    assert meta.sample_ids == ("g_g0", "g_g1")
    assert meta.sequence_lengths == (4, 3)
    assert [tags[fields.VALID_TOKENS] for tags in meta.tags] == [2, 1]
    batch = plane.get_samples(meta, sorted(meta.fields))
    assert batch.jagged(fields.INPUT_IDS).values.tolist() == [5, 6, 7, 8, 5, 6, 9]
    assert batch.jagged(fields.TOKEN_MASK).values.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert batch.jagged(fields.GENERATION_LOGPROBS).values.tolist() == [0, 0, -0.5, -0.25, 0, 0, -1.0]
    assert batch.jagged(fields.TOKEN_VERSIONS).values.tolist() == [-1, -1, 3, 4, -1, -1, 4]
    assert batch.tensor(fields.REWARD).tolist() == [1.0, 0.0]
    assert batch.tensor(fields.ADVANTAGE).tolist() == [0.5, -0.5]
    assert batch.tensor(fields.TRUNCATED).tolist() == [False, True]


async def test_a_second_group_shares_the_partition_and_a_wrong_count_is_refused() -> None:
    plane = penstock.MemoryDataPlane()
    for name in ("one", "two"):
        await penstock.put_group(plane, name, (5,), RESPONSES, [1.0, 0.0], [0.0, 0.0])
    with pytest.raises(DataPlaneError, match="group three: 2 responses with 2 rewards and 1 advantages"):
        await penstock.put_group(plane, "three", (5,), RESPONSES, [1.0, 0.0], [0.0])
    meta = await penstock.put_group(plane, "four", (5,), RESPONSES, [1.0, 0.0], [0.0, 0.0])
    assert plane.count_samples(meta.partition_id) == 6


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "adapters"])
async def test_engine_and_trainer_of_a_folder_share_no_weights_until_they_are_published(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    model = penstock.ModelConfig.model_validate({"path": str(save_tiny_model(tmp_path)), "lora": lora})
    plane = penstock.MemoryDataPlane()
    engine = penstock.EmbeddedEngine.from_pretrained(model, device="cpu", max_num_seqs=2, max_model_len=16)
    training = penstock.TrainingConfig.model_validate({"optimizer": {"lr": 1e-2}})
    trainer = penstock.LocalTrainer.from_pretrained(model, plane, training=training, device="cpu")
    before = await engine.weight_digests()
    meta = await penstock.put_group(plane, "g", (5, 6), RESPONSES, [1.0, 0.0], [1.0, -1.0])
    done = await trainer.train(0, [meta])
    assert (done.updated, done.version) == (True, 1)
    assert await engine.weight_digests() == before
    await penstock.WeightSynchronizer([engine]).publish(await trainer.publish_weights())
    assert await engine.weight_digests() != before
    assert engine.stats().version == 1
    await trainer.close()
    await engine.close()

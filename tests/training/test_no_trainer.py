"""`training.backend: none`: steps come and go, and nothing is trained."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import StepStateError
from penstock.training.workers.none import NoTrainer

META = KVBatchMeta("p", ("a_g0", "a_g1"), frozenset({fields.REWARD}), (3, 4))


def plane() -> MemoryDataPlane:
    made = MemoryDataPlane()
    made.register_partition("p", fields.schema(fields.REWARD, *fields.LATER_FIELDS))
    made.put_samples(META.sample_ids, {fields.REWARD: torch.ones(2)}, "p")
    return made


async def test_a_step_changes_nothing_and_counts_no_token_as_trained() -> None:
    trainer = NoTrainer(plane(), AlgorithmConfig())
    for step in range(2):
        await trainer.begin_train_step(step)
        chunk = await trainer.train_microbatch(step, META)
        assert (chunk.valid_tokens, chunk.microbatches) == (0.0, 0)
        result = await trainer.finish_train_step(step)
        assert (result.updated, result.version, dict(result.metrics)) == (False, 0, {})


async def test_calls_out_of_order_are_refused_as_by_any_trainer() -> None:
    trainer = NoTrainer(plane(), AlgorithmConfig())
    with pytest.raises(StepStateError):
        await trainer.train_microbatch(0, META)
    await trainer.begin_train_step(0)
    with pytest.raises(StepStateError):
        await trainer.begin_train_step(1)
    await trainer.abort_train_step(0)
    await trainer.begin_train_step(1)


async def test_it_has_no_weights_to_publish() -> None:
    publication = await NoTrainer(plane(), AlgorithmConfig()).publish_weights()
    assert publication.version == 0
    assert publication.manifest.entries == publication.endpoints == ()


async def test_a_checkpoint_has_nothing_of_it(tmp_path: Path) -> None:
    trainer = NoTrainer(plane(), AlgorithmConfig())
    (await trainer.snapshot()).write(tmp_path)
    assert os.listdir(tmp_path) == []
    await trainer.load_checkpoint(tmp_path)


async def test_weights_that_never_change_have_no_kl_to_the_reference() -> None:
    kl_in_reward = AlgorithmConfig.model_validate(
        {"advantage": {"kind": "reinforce_pp"}, "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}
    )
    data_plane = plane()
    prepared = await NoTrainer(data_plane, kl_in_reward).prepare(META)
    names = [fields.KL_TO_GO_SUM, fields.KL_TO_GO_SQUARE_SUM]
    batch = data_plane.get_samples(prepared.meta, names)
    assert [batch.tensor(name).tolist() for name in names] == [[0.0, 0.0]] * 2
    assert (await NoTrainer(data_plane, AlgorithmConfig()).prepare(META)).meta == META

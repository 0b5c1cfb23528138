"""What the advantage pump writes, for each estimator and shaping; numbers worked out by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.controller.pumps.advantage import AdvantagePump, ScoredChunk
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import Column
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import MissingRowError

PARTITION = "rows"
REWARDS = (1.0, 0.0, 0.0, 4.0, 4.0, 4.0)
"""Two groups of three."""


def put(plane: MemoryDataPlane, **columns: Column) -> KVBatchMeta:
    plane.register_partition(PARTITION, fields.ROW_SCHEMA)
    ids = tuple(fields.sample_id(f"group{i // 3}", i % 3) for i in range(6))
    written: dict[str, Column] = {
        fields.REWARD: torch.tensor(REWARDS),
        fields.RESPONSE_LENGTH: torch.tensor([4, 4, 4, 4, 8, 10]),
        fields.TRUNCATED: torch.tensor([False, False, False, False, False, True]),
        fields.SAMPLE_MASK: torch.ones(6),
        **columns,
    }
    plane.put_samples(ids, written, PARTITION)
    return KVBatchMeta(PARTITION, ids, frozenset(written), (20,) * 6)


async def score(settings: dict[str, Any], **columns: Column) -> tuple[ScoredChunk, MemoryDataPlane]:
    plane = MemoryDataPlane()
    meta = put(plane, **columns)
    pump = AdvantagePump(plane, AlgorithmConfig.model_validate(settings), longest_response=10)
    task = asyncio.create_task(pump.run())
    try:
        return await pump.submit(meta), plane
    finally:
        task.cancel()


async def advantages(settings: dict[str, Any], **columns: Column) -> list[float]:
    chunk, plane = await score(settings, **columns)
    written: list[float] = plane.get_samples(chunk.meta, (fields.ADVANTAGE,)).tensor(fields.ADVANTAGE).tolist()
    return written


STD = math.sqrt(1 / 3)
"""Sample deviation of 1, 0, 0."""


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ({"kind": "grpo", "epsilon": 1e-12}, [2 / 3 / STD, -1 / 3 / STD, -1 / 3 / STD, 0, 0, 0]),
        ({"kind": "grpo", "normalize_std": False}, [2 / 3, -1 / 3, -1 / 3, 0, 0, 0]),
        ({"kind": "rloo"}, [1, -0.5, -0.5, 0, 0, 0]),
        ({"kind": "max_normalized", "epsilon": 1e-12}, [1, -0.5, -0.5, 0, 0, 0]),
        ({"kind": "reward"}, list(REWARDS)),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else "",
)
async def test_group_relative_estimators(advantage: dict[str, Any], expected: list[float]) -> None:
    assert await advantages({"advantage": advantage}) == pytest.approx(expected, abs=1e-6)


async def test_whole_batch_estimators_have_no_mean_and_unit_spread_over_what_they_weigh() -> None:
    lengths = [4, 4, 4, 4, 8, 10]
    by_sample = await advantages({"advantage": {"kind": "batch_whitened"}})
    assert sum(by_sample) == pytest.approx(0, abs=1e-5)
    for kind in ("reinforce_pp", "reinforce_pp_baseline"):
        found = await advantages({"advantage": {"kind": kind}})
        assert sum(a * n for a, n in zip(found, lengths, strict=True)) == pytest.approx(0, abs=1e-4)
        spread = sum(a * a * n for a, n in zip(found, lengths, strict=True)) / sum(lengths)
        assert spread == pytest.approx(1, rel=1e-5)


async def test_rewards_are_scaled_then_clipped_then_shaped_by_length() -> None:
    reward = {"scale": 2, "clip_high": 5, "overlong": "soft", "overlong_buffer": 4, "overlong_penalty": 1.0}
    chunk, _ = await score({"advantage": {"kind": "reward"}, "reward": reward})
    assert chunk.shaped_S.tolist() == [2, 0, 0, 5, 4.5, 4]
    assert chunk.rewards_S.tolist() == list(REWARDS)
    assert chunk.flat_groups() == ("group1",)  # four of them are as good as each other, whatever their lengths


async def test_a_group_of_which_nothing_is_trained_is_flat() -> None:
    truncated = torch.tensor([True, True, True, False, False, True])
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    chunk, _ = await score({"reward": {"overlong": "mask"}}, truncated=truncated, reward=rewards)
    assert chunk.untrained_groups() == chunk.flat_groups() == ("group0",)


async def test_overlong_filtering_takes_truncated_samples_out_of_the_loss() -> None:
    chunk, plane = await score({"reward": {"overlong": "mask"}})
    mask = plane.get_samples(chunk.meta, (fields.SAMPLE_MASK,)).tensor(fields.SAMPLE_MASK)
    assert mask.tolist() == chunk.mask_S.tolist() == [1, 1, 1, 1, 1, 0]
    assert chunk.valid_tokens == 24


async def test_metadata_follows_the_mask_and_with_it_the_plan() -> None:
    plane = MemoryDataPlane()
    meta = put(plane).tag_rows(fields.VALID_TOKENS, [4, 4, 4, 4, 8, 10])
    pump = AdvantagePump(plane, AlgorithmConfig.model_validate({"reward": {"overlong": "mask"}}), longest_response=10)
    task = asyncio.create_task(pump.run())
    chunk = await pump.submit(meta)
    task.cancel()
    assert [tags[fields.VALID_TOKENS] for tags in chunk.meta.tags] == [4, 4, 4, 4, 8, 0]


async def test_metadata_of_rows_that_nobody_counted_claims_no_count() -> None:
    chunk, _ = await score({"reward": {"overlong": "mask"}})
    assert [tags.get(fields.VALID_TOKENS, "absent") for tags in chunk.meta.tags] == ["absent"] * 5 + [0]


async def test_masked_samples_do_not_count_in_the_mean_of_the_step() -> None:
    """Without the last sample the step has four tokens of reward 1, eight of 0 and twelve of 4."""
    settings = {"advantage": {"kind": "reinforce_pp"}, "reward": {"overlong": "mask"}}
    found = await advantages(settings)
    mean = (4 * 1 + 12 * 4) / 24
    std = math.sqrt((4 * 1 + 12 * 16) / 24 - mean**2)
    assert found == pytest.approx([(r - mean) / std for r in REWARDS[:5]] + [0.0], abs=1e-4)


async def test_kl_in_the_reward_hands_its_weight_to_the_trainer() -> None:
    kl = {"coefficient": 0.25, "estimator": "k1", "place": "reward"}
    chunk, plane = await score({"kl": kl})
    assert plane.get_samples(chunk.meta, (fields.KL_WEIGHT,)).tensor(fields.KL_WEIGHT).tolist() == [0.25] * 6


async def test_reinforce_pp_divides_the_kl_weight_by_the_spread_too() -> None:
    """With no KL at all the spread is that of the rewards over tokens: mean 92 / 34, square mean 356 / 34."""
    kl = {"coefficient": 0.25, "estimator": "k1", "place": "reward"}
    none = {name: torch.zeros(6, dtype=torch.float64) for name in (fields.KL_TO_GO_SUM, fields.KL_TO_GO_SQUARE_SUM)}
    chunk, plane = await score({"advantage": {"kind": "reinforce_pp"}, "kl": kl}, **none)
    mean = (4 * 1 + 22 * 4) / 34
    std = math.sqrt((4 * 1 + 22 * 16) / 34 - mean**2)
    weights = plane.get_samples(chunk.meta, (fields.KL_WEIGHT,)).tensor(fields.KL_WEIGHT)
    assert weights.tolist() == pytest.approx([0.25 / std] * 6, rel=1e-6)


async def test_flat_groups_are_those_without_spread_and_can_be_left_out() -> None:
    chunk, _ = await score({})
    assert chunk.flat_groups() == ("group1",)
    rest = chunk.without({"group1"})
    assert rest.meta.group_ids == ("group0",)
    assert rest.rewards_S.tolist() == list(REWARDS[:3])
    assert rest.valid_tokens == 12


async def test_an_error_goes_to_whoever_submitted_the_chunk_and_the_pump_goes_on() -> None:
    plane = MemoryDataPlane()
    meta = put(plane)
    pump = AdvantagePump(plane, AlgorithmConfig(), longest_response=10)
    task = asyncio.create_task(pump.run())
    unknown = KVBatchMeta(PARTITION, ("nobody_g0",), frozenset(), (3,))
    with pytest.raises(MissingRowError):
        await pump.submit(unknown)
    assert (await pump.submit(meta)).meta.group_ids == ("group0", "group1")
    task.cancel()

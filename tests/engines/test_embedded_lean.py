"""The lean decode step's memory: what it computes between the projections and the cache, and how the cache takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.rollout.engines.embedded.slot_cache import KVShape, SlotCache
from penstock.rollout.engines.embedded.workspace import Heads, Workspace
from tests.engines.helpers import with_norms_of_its_own
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")


def rotated_by_the_book(heads_BND: Tensor, cos_BD: Tensor, sin_BD: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin`, with `rotate_half([a, b]) = [-b, a]`."""
    first, second = heads_BND.chunk(2, dim=-1)
    return heads_BND * cos_BD.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin_BD.unsqueeze(1)


@pytest.mark.parametrize(("query", "key_value"), [(4, 2), (3, 3), (8, 1)])
def test_rotation_leaves_queries_per_head_and_keys_and_values_for_the_cache(query: int, key_value: int) -> None:
    torch.manual_seed(0)
    rows, depth = 5, 8
    space = Workspace(rows, 16, Heads(query, key_value, depth), CPU)
    angle_BD = torch.rand(rows, depth // 2).repeat(1, 2) * 6.0
    signs_D = torch.ones(depth).index_fill_(0, torch.arange(depth // 2), -1.0)
    space.angles_B2D.copy_(torch.stack((angle_BD.cos(), angle_BD.sin() * signs_D), dim=1))
    projected_BND = torch.randn(rows, query + 2 * key_value, depth)
    space.qkv_BJ.copy_(projected_BND.flatten(1))
    space.rotate()
    query_BND, key_BKD, value_BKD = projected_BND.split((query, key_value, key_value), dim=1)
    turned_BND = rotated_by_the_book(query_BND, angle_BD.cos(), angle_BD.sin())
    stored_BKD = rotated_by_the_book(key_BKD, angle_BD.cos(), angle_BD.sin())
    torch.testing.assert_close(space.turned_LGD, turned_BND.reshape(rows * key_value, -1, depth))
    torch.testing.assert_close(space.stored_key_LD, stored_BKD.reshape(-1, depth))
    torch.testing.assert_close(space.stored_value_LD, value_BKD.reshape(-1, depth))


@pytest.mark.parametrize("keys_by_depth", [True, False])
def test_a_step_writes_keys_and_values_of_its_rows_and_nothing_else(keys_by_depth: bool) -> None:
    slots, heads, context, depth, layers = 5, 2, 6, 4, 3
    shape = KVShape(layers, heads, depth, torch.float32, CPU)
    cache = SlotCache(shape, slots, context, keys_by_depth=keys_by_depth)
    first, positions_B = 1, torch.tensor([4, 0, 2])
    cache.begin_step(first, context, positions_B)
    key_BKD, value_BKD = torch.randn(2, 3, heads, depth)
    key_LDC, value_LCD = cache.heads_after(1, key_BKD.view(-1, depth), value_BKD.view(-1, depth))
    expected_ZSKCD = torch.zeros(2 * layers, slots, heads, context, depth)
    for row, position in enumerate(positions_B.tolist()):
        expected_ZSKCD[2, first + row, :, position] = key_BKD[row]
        expected_ZSKCD[3, first + row, :, position] = value_BKD[row]
    found_ZSKCD = torch.stack([cache.read_prefix(row, context) for row in range(slots)], dim=1)
    assert torch.equal(found_ZSKCD, expected_ZSKCD)
    rows = slice(first, first + 3)
    assert torch.equal(key_LDC, expected_ZSKCD[2, rows].flatten(0, 1).transpose(1, 2))
    assert torch.equal(value_LCD, expected_ZSKCD[3, rows].flatten(0, 1))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_lean_steps_give_the_models_own_logits_as_rows_come_and_go(family: str) -> None:
    """The same steps through both ways; a change of the number of rows must leave nothing of the step before."""
    models = [with_norms_of_its_own(tiny_model(family), seed=1) for _ in range(2)]
    torch.manual_seed(0)
    with torch.inference_mode():
        lean, plain = (
            ModelRunner(model, slots=6, max_model_len=32, deterministic=False, use_fused=use_fused)
            for model, use_fused in zip(models, (True, False), strict=True)
        )
        assert lean._fused is not None
        compare_steps(lean, plain)


def compare_steps(lean: ModelRunner, plain: ModelRunner) -> None:
    prefix = (3, 4, 5)
    for runner in (lean, plain):
        runner.cache.write_prefix(0, 6, runner.prefill([prefix])[0])
    for step, rows in enumerate((6, 6, 2, 4, 4, 1)):
        tokens_B = torch.randint(0, lean.vocabulary, (rows,))
        positions_B = torch.full((rows,), len(prefix) + step)
        expected_BV, found_BV = (runner.decode(tokens_B, positions_B, runner.width(12)) for runner in (plain, lean))
        torch.testing.assert_close(found_BV, expected_BV, rtol=1e-4, atol=1e-4)

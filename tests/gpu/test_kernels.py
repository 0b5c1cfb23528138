"""Each kernel of the embedded engine next to plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.kernels import DEVICE, ON_GPU, needs_gpu, needs_kernels

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def rand(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, device=DEVICE).to(dtype)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < TOLERANCE[dtype]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 64])
def test_the_norm_of_a_sum_and_the_sum_itself(dtype: torch.dtype, width: int) -> None:
    from penstock.rollout.engines.embedded.device.row_kernels import add_norm

    hidden, delta, weight = rand(3, width, dtype=dtype), rand(3, width, dtype=dtype), rand(width, dtype=dtype)
    total = hidden + delta
    expected = weight * F.rms_norm(total.float(), (width,), eps=1e-5).to(dtype)
    assert_close(add_norm(hidden, delta, weight, 1e-5), expected, dtype)
    assert torch.equal(hidden, total)
    assert_close(add_norm(hidden, None, weight, 1e-5), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_times_up(dtype: torch.dtype) -> None:
    from penstock.rollout.engines.embedded.device.row_kernels import silu_mul

    gate_up = rand(2, 2 * 1030, dtype=dtype)
    assert_close(silu_mul(gate_up), F.silu(gate_up[:, :1030]) * gate_up[:, 1030:], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_rotated_and_keys_and_values_stored(dtype: torch.dtype, normed: bool) -> None:
    from penstock.rollout.engines.embedded.device.row_kernels import rotate_and_store

    heads, kv_heads, depth, context = 6, 3, 8, 7
    qkv = rand(3, (heads + 2 * kv_heads) * depth, dtype=dtype)
    cos, sin = rand(context, depth, dtype=dtype), rand(context, depth, dtype=dtype)
    q_weight, k_weight = rand(depth, dtype=dtype), rand(depth, dtype=dtype)
    key, value = rand(4, kv_heads, context, depth, dtype=dtype), rand(4, kv_heads, context, depth, dtype=dtype)
    slots, positions = [2, -1, 0], [5, 1, 0]
    before = qkv.clone(), key.clone(), value.clone()
    norms = (q_weight, k_weight, 1e-6) if normed else None
    rotate_and_store(qkv, norms, cos, sin, ints(slots), ints(positions), key, value)

    def turned(row: int, part: slice, weight: Tensor) -> Tensor:
        x = before[0][row].view(-1, depth)[part]
        if normed:
            x = weight * F.rms_norm(x.float(), (depth,), eps=1e-6).to(dtype)
        rotated = torch.cat((-x[:, depth // 2 :], x[:, : depth // 2]), -1)
        return x * cos[positions[row]] + rotated * sin[positions[row]]

    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            assert torch.equal(qkv[row], before[0][row])
            continue
        found = qkv[row].view(-1, depth)
        assert_close(found[:heads], turned(row, slice(0, heads), q_weight), dtype)
        assert_close(key[slot, :, position], turned(row, slice(heads, heads + kv_heads), k_weight), dtype)
        assert torch.equal(value[slot, :, position], before[0][row].view(-1, depth)[heads + kv_heads :])
        key[slot, :, position], value[slot, :, position] = before[1][slot, :, position], before[2][slot, :, position]
    assert torch.equal(key, before[1]), "nothing else is written"
    assert torch.equal(value, before[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("group", "depth"), [(2, 8), (3, 32)])
def test_decode_attention_covers_each_rows_own_length(dtype: torch.dtype, parts: int, group: int, depth: int) -> None:
    from penstock.rollout.engines.embedded.device.attention_kernels import decode_attention

    kv_heads, context = 2, 150
    key, value = rand(4, kv_heads, context, depth, dtype=dtype), rand(4, kv_heads, context, depth, dtype=dtype)
    key[3, :, 100:] = torch.nan  # beyond the length of what sits there; must not be read
    slots, lengths = [3, 0, -1, 1], [100, 1, 4, 150]
    qkv = rand(4, kv_heads * (group + 2) * depth, dtype=dtype)
    places = ints(slots), ints([length - 1 for length in lengths])
    mixed = decode_attention(qkv, key, value, *places, kv_heads * group, 0.3, parts=parts)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if slot < 0:
            continue
        query = qkv[row, : kv_heads * group * depth].view(kv_heads, group, depth).float()
        weights = (query @ key[slot, :, :length].float().transpose(1, 2) * 0.3).softmax(-1)
        assert_close(mixed[row], (weights @ value[slot, :, :length].float()).flatten(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_attention_is_causal_and_keeps_prefixes_apart(dtype: torch.dtype) -> None:
    from penstock.rollout.engines.embedded.device.attention_kernels import prefill_attention

    heads, kv_heads, depth, context = 2, 1, 16, 80
    key, value = rand(3, kv_heads, context, depth, dtype=dtype), rand(3, kv_heads, context, depth, dtype=dtype)
    slots, starts, lengths = [2, 0], [0, 70], [70, 5]
    qkv = rand(75, (heads + 2 * kv_heads) * depth, dtype=dtype)
    mixed = prefill_attention(qkv, key, value, ints(slots), ints(starts), ints(lengths), 70, heads, 0.25)
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        query = qkv[start : start + length, : heads * depth].view(length, heads, depth).transpose(0, 1).float()
        own = [side[slot, :, :length].float().expand(heads, -1, -1) for side in (key, value)]
        expected = F.scaled_dot_product_attention(query, *own, is_causal=True, scale=0.25)
        assert_close(mixed[start : start + length], expected.transpose(0, 1).flatten(1), dtype)


def test_prefixes_are_copied_in_all_layers_and_no_further() -> None:
    from penstock.rollout.engines.embedded.device.row_kernels import copy_prefixes

    kv = rand(4, 5, 2, 40, 8)
    expected = kv.clone()
    expected[:, 3, :, :33], expected[:, 4, :, :2] = kv[:, 1, :, :33], kv[:, 0, :, :2]
    copy_prefixes(kv, ints([1, 0]), ints([3, 4]), ints([33, 2]))
    assert torch.equal(kv, expected)


class TestSampling:
    """Tokens drawn on the device."""

    def draw(
        self, logits_BV: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
    ) -> tuple[list[int], list[float]]:
        """Row r sits in slot r."""
        from penstock.rollout.engines.embedded.device.sampling_kernels import SamplingState, sample

        rows = logits_BV.shape[0]
        state = SamplingState.empty(rows, DEVICE)
        state.temperature_S.copy_(torch.tensor(temperatures))
        state.seed_S.copy_(torch.tensor(seeds))
        state.position_S.copy_(torch.tensor(positions))
        drawn_2B = torch.zeros((2, rows), dtype=torch.int32, device=DEVICE)
        sample(logits_BV.to(DEVICE), torch.arange(rows, dtype=torch.int32, device=DEVICE), state, drawn_2B)
        assert state.position_S.tolist() == [position + 1 for position in positions]
        assert state.token_S.tolist() == drawn_2B[0].tolist()
        return drawn_2B[0].tolist(), drawn_2B[1].view(torch.float32).tolist()

    def test_log_probs_are_those_of_the_tempered_distribution(self) -> None:
        logits_BV = torch.randn(4, 5000) * 3
        temperatures = [1.0, 0.5, 2.0, 0.0]
        tokens, logprobs = self.draw(logits_BV, temperatures, [1, 2, 3, 4], [5, 6, 7, 8])
        for row, temperature in enumerate(temperatures):
            expected_V = (logits_BV[row].double() / (temperature or 1.0)).log_softmax(-1)
            assert logprobs[row] == pytest.approx(float(expected_V[tokens[row]]), abs=1e-4)
        assert tokens[3] == int(logits_BV[3].argmax())

    @needs_gpu  # the interpreter would take a minute for a thousand draws
    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_frequencies_follow_the_distribution(self, temperature: float) -> None:
        """Chi-square over draws at different positions of one seed, far below the 1-in-10,000 quantile."""
        draws = 20_000
        logits_V = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -torch.inf, 0.9, 0.1, -0.2])
        every = [temperature] * draws, [11] * draws, list(range(draws))
        tokens, _ = self.draw(logits_V.expand(draws, -1).contiguous(), *every)
        counts_V = np.bincount(tokens, minlength=len(logits_V))
        expected_V = (logits_V.double() / temperature).softmax(-1).numpy() * draws
        assert counts_V[8] == 0
        possible = expected_V > 0
        chi_square = float(((counts_V - expected_V)[possible] ** 2 / expected_V[possible]).sum())
        assert chi_square < 10 + 4 * math.sqrt(20) + 6

    def test_noise_depends_on_seed_and_position_and_on_nothing_else(self) -> None:
        logits_V = torch.zeros(3000)
        both, _ = self.draw(logits_V.expand(4, -1).contiguous(), [1.0] * 4, [7, 8, 7, 7], [3, 3, 3, 4])
        alone, _ = self.draw(logits_V[None], [1.0], [7], [3])
        assert both[0] == both[2] == alone[0]
        assert len({both[0], both[1], both[3]}) == 3

    def test_seeds_above_32_bits_count(self) -> None:
        logits_V = torch.zeros(3000)
        tokens, _ = self.draw(logits_V.expand(3, -1).contiguous(), [1.0] * 3, [1, 1 + 2**40, 1 - 2**50], [0, 0, 0])
        assert len(set(tokens)) == 3

    def test_logits_that_are_not_finite_show_in_the_log_prob(self) -> None:
        logits_BV = torch.zeros(2, 40)
        logits_BV[0, 3], logits_BV[1, 5] = torch.nan, torch.inf
        _, logprobs = self.draw(logits_BV, [1.0, 1.0], [0, 0], [0, 0])
        assert not np.isfinite(logprobs).any()

    def test_padding_draws_nothing(self) -> None:
        from penstock.rollout.engines.embedded.device.sampling_kernels import SamplingState, sample

        state = SamplingState.empty(1, DEVICE)
        drawn_2B = torch.full((2, 2), -5, dtype=torch.int32, device=DEVICE)
        sample(torch.zeros(2, 40, device=DEVICE), ints([-1, -1]), state, drawn_2B)
        assert drawn_2B.tolist() == [[-5, -5], [-5, -5]]
        assert state.position_S.tolist() == [0]

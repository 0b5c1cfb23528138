"""Drawing one token per row on the device.

A token is drawn by a race: each token has an independent exponential variable, and the one whose probability over its
variable is largest wins, which happens with exactly its probability (the Gumbel-max trick without logarithms). The
variables are a pure function of the request's seed, the position and the token id (Philox, a counter-based generator),
so a response does not depend on what shares its batch. The vocabulary is processed in blocks, which a second kernel
joins, in float32 throughout.
"""

# Kernel arguments are device pointers and compile-time constants; Triton's language has no types for a checker.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUARTER = 128
"""Philox gives four numbers at a time, so a block of the vocabulary is processed in four quarters of this size."""
_WARPS = 1


@dataclass(frozen=True)
class SamplingState:
    """What a decode step reads and writes per slot. A greedy slot has temperature 0."""

    token_S: Tensor
    """The pending token (int32)."""
    position_S: Tensor
    """Its position (int32)."""
    temperature_S: Tensor
    seed_S: Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> SamplingState:
        """Empty slots."""
        return cls(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.ones(slots, dtype=torch.float32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
        )


@triton.jit
def _exponential(bits):
    """A standard exponential variable, `-log(1 - u)`, from 32 random bits; with full relative precision for small u, as
    it is the smallest that decide."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return tl.where(uniform < 0.015625, series, -tl.log(1.0 - uniform))


@triton.jit
def _faster(score, token, logits, top, greedy, bits, other):
    """Which of two tokens wins, element by element; of two that are equal, the first."""
    found = tl.where(greedy, logits, tl.exp(logits - top) / _exponential(bits))
    return tl.maximum(score, found), tl.where(found > score, other, token)


@triton.jit
def _sample_block(
    logits_ptr, slots_ptr, position_of_ptr, temperature_of_ptr, seed_of_ptr, partial_ptr, drawn_ptr, vocabulary,
    QUARTER: tl.constexpr
):  # fmt: skip
    """One program: one row, four quarters of a block of the vocabulary. Leaves the largest logit, the sum of
    exponentials relative to it, the winner's score on a scale common to all blocks, and the winner."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        temperature = tl.load(temperature_of_ptr + slot)
        greedy = temperature == 0.0
        factor = 1.0 / tl.where(greedy, 1.0, temperature)
        offset, minus_inf = tl.arange(0, QUARTER), float("-inf")
        first = block * (4 * QUARTER) + offset
        second, third, fourth = first + QUARTER, first + 2 * QUARTER, first + 3 * QUARTER
        logits_ptr += row * vocabulary
        x1 = tl.load(logits_ptr + first, mask=first < vocabulary, other=minus_inf).to(tl.float32) * factor
        x2 = tl.load(logits_ptr + second, mask=second < vocabulary, other=minus_inf).to(tl.float32) * factor
        x3 = tl.load(logits_ptr + third, mask=third < vocabulary, other=minus_inf).to(tl.float32) * factor
        x4 = tl.load(logits_ptr + fourth, mask=fourth < vocabulary, other=minus_inf).to(tl.float32) * factor
        top = tl.max(tl.maximum(tl.maximum(x1, x2), tl.maximum(x3, x4)), axis=0)
        safe = tl.where(top == minus_inf, 0.0, top)
        total = tl.sum(tl.exp(x1 - safe) + tl.exp(x2 - safe) + tl.exp(x3 - safe) + tl.exp(x4 - safe), axis=0)
        counter, zero = block * QUARTER + offset, offset * 0
        position = zero + tl.load(position_of_ptr + slot)
        bits1, bits2, bits3, bits4 = tl.philox(tl.load(seed_of_ptr + slot), counter, position, zero, zero)
        score, token = tl.where(greedy, x1, tl.exp(x1 - safe) / _exponential(bits1)), first
        score, token = _faster(score, token, x2, safe, greedy, bits2, second)
        score, token = _faster(score, token, x3, safe, greedy, bits3, third)
        score, token = _faster(score, token, x4, safe, greedy, bits4, fourth)
        best = tl.max(score, axis=0)
        at = row * tl.num_programs(1) + block
        tl.store(partial_ptr + 3 * at, top)
        tl.store(partial_ptr + 3 * at + 1, total)
        common = tl.where(greedy, best, tl.log(best) + top)
        tl.store(partial_ptr + 3 * at + 2, tl.where(common == common, common, minus_inf))
        tl.store(drawn_ptr + at, tl.min(tl.where(score == best, token, 2147483647), axis=0))


@triton.jit
def _take_token(
    logits_ptr, partial_ptr, drawn_ptr, slots_ptr, token_of_ptr, position_of_ptr, temperature_of_ptr, tokens_ptr,
    logprobs_ptr, vocabulary, blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: one row. Joins the blocks, and makes the token the slot's pending one."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        block = tl.arange(0, BLOCK)
        inside = block < blocks
        at = partial_ptr + 3 * (row * blocks + block)
        tops = tl.load(at, mask=inside, other=float("-inf"))
        totals = tl.load(at + 1, mask=inside, other=0.0)
        top = tl.max(tops, axis=0)
        log_total = top + tl.log(tl.sum(totals * tl.exp(tops - top), axis=0))
        _, winner = tl.max(tl.load(at + 2, mask=inside, other=float("-inf")), axis=0, return_indices=True)
        # If logits are not finite there may be no winner; the log-prob shows it, and the token id must be valid.
        token = tl.minimum(tl.load(drawn_ptr + row * blocks + winner), vocabulary - 1)
        temperature = tl.load(temperature_of_ptr + slot)
        factor = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
        logit = tl.load(logits_ptr + row * vocabulary + token).to(tl.float32) * factor
        tl.store(tokens_ptr + row, token)
        tl.store(logprobs_ptr + row, logit - log_total)
        tl.store(token_of_ptr + slot, token)
        tl.store(position_of_ptr + slot, tl.load(position_of_ptr + slot) + 1)


def sample(logits_BV: Tensor, slots_B: Tensor, state: SamplingState, drawn_2B: Tensor) -> None:
    """Draw a token for every row, make it the slot's pending one, and write tokens and log-probs to `drawn_2B`.

    The log-prob (the second row, float32 in the memory of an int32) is that of the tempered distribution, and not
    finite if the logits are not. Logits may be -inf for tokens that must not be drawn.
    """
    rows, vocabulary = logits_BV.shape
    blocks = triton.cdiv(vocabulary, 4 * _QUARTER)
    partial_BX3 = torch.empty((rows, blocks, 3), dtype=torch.float32, device=logits_BV.device)
    token_BX = torch.empty((rows, blocks), dtype=torch.int32, device=logits_BV.device)
    _sample_block[(rows, blocks)](
        logits_BV,
        slots_B,
        state.position_S,
        state.temperature_S,
        state.seed_S,
        partial_BX3,
        token_BX,
        vocabulary,
        QUARTER=_QUARTER,
        num_warps=_WARPS,
    )
    _take_token[(rows,)](
        logits_BV,
        partial_BX3,
        token_BX,
        slots_B,
        state.token_S,
        state.position_S,
        state.temperature_S,
        drawn_2B[0],
        drawn_2B[1].view(torch.float32),
        vocabulary,
        blocks,
        BLOCK=triton.next_power_of_2(blocks),
        num_warps=1,
    )

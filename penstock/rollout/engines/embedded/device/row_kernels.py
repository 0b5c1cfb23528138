"""Kernels over the rows of a batch: what happens between the matrix products, in one pass over memory each.

A row is one token: of one slot in a decode step, of a packed prompt in a prefill. Numbers are rounded to the model's
dtype where the Hugging Face modules round them, so that log-probs agree with a trainer's. A row whose slot is negative
is padding; what is computed for it is never read.
"""

# Kernel arguments are device pointers and compile-time constants; Triton's language has no types for a checker.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SILU_BLOCK = 1024
_GATHER_BLOCK = 128
_COPY_BLOCK = 32


@triton.jit
def _gather(slots_ptr, token_of_ptr, position_of_ptr, tokens_ptr, positions_ptr, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=-1)
    tl.store(tokens_ptr + row, tl.load(token_of_ptr + slot, mask=slot >= 0, other=0), mask=inside)
    tl.store(positions_ptr + row, tl.load(position_of_ptr + slot, mask=slot >= 0, other=0), mask=inside)


def gather(slots_B: Tensor, token_S: Tensor, position_S: Tensor) -> tuple[Tensor, Tensor]:
    """The pending token of each row and its position."""
    rows = slots_B.shape[0]
    tokens_B, positions_B = torch.empty_like(slots_B), torch.empty_like(slots_B)
    grid = (triton.cdiv(rows, _GATHER_BLOCK),)
    _gather[grid](slots_B, token_S, position_S, tokens_B, positions_B, rows, BLOCK=_GATHER_BLOCK)
    return tokens_B, positions_B


@triton.jit
def _add_norm(
    hidden_ptr,
    delta_ptr,
    weight_ptr,
    normed_ptr,
    epsilon,
    WIDTH: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    hidden = tl.load(hidden_ptr + at, mask=inside, other=0.0)
    if DELTA:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        hidden = (hidden.to(tl.float32) + delta.to(tl.float32)).to(hidden.dtype)
        tl.store(hidden_ptr + at, hidden, mask=inside)
    exact = hidden.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / WIDTH + epsilon)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normed = (exact * scale).to(hidden.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + at, normed.to(hidden.dtype), mask=inside)


def add_norm(hidden_BH: Tensor, delta_BH: Tensor | None, weight_H: Tensor, epsilon: float) -> Tensor:
    """Add `delta` to the residual stream, in place, and return its root-mean-square norm."""
    rows, width = hidden_BH.shape
    normed_BH = torch.empty_like(hidden_BH)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        hidden_BH,
        hidden_BH if delta_BH is None else delta_BH,
        weight_H,
        normed_BH,
        epsilon,
        WIDTH=width,
        DELTA=delta_BH is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )
    return normed_BH


@triton.jit
def _turn(first, second, weight_ptr, cos_ptr, sin_ptr, epsilon, half, HALF: tl.constexpr, NORM: tl.constexpr):
    """Norm and rotary embedding of some heads of one row, given as the two halves `[heads, HALF]` of each."""
    inside = half < HALF
    dtype = first.dtype
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF) + epsilon)[:, None]
        weight1 = tl.load(weight_ptr + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        weight2 = tl.load(weight_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        x1 = ((x1 * scale).to(dtype).to(tl.float32) * weight1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale).to(dtype).to(tl.float32) * weight2).to(dtype).to(tl.float32)
    cos1 = tl.load(cos_ptr + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + HALF + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned1 = (x1 * cos1).to(dtype).to(tl.float32) + (-x2 * sin1).to(dtype).to(tl.float32)
    turned2 = (x2 * cos2).to(dtype).to(tl.float32) + (x1 * sin2).to(dtype).to(tl.float32)
    return turned1.to(dtype), turned2.to(dtype)


@triton.jit
def _rotate_and_store(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    key_ptr,
    value_ptr,
    context,
    epsilon,
    QUERY_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """One program takes `HEADS` heads of one row: a block of query heads, the key heads or the value heads."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots_ptr + row).to(tl.int64), tl.load(positions_ptr + row)
    if slot >= 0:
        head, half = tl.arange(0, HEAD_BLOCK), tl.arange(0, HALF_BLOCK)
        inside = (head < HEADS)[:, None] & (half < HALF)[None, :]
        at = (row * (QUERY_BLOCKS + 2) + block) * HEADS + head
        source = qkv_ptr + at[:, None] * (2 * HALF) + half[None, :]
        first = tl.load(source, mask=inside, other=0.0)
        second = tl.load(source + HALF, mask=inside, other=0.0)
        cos_ptr += position * (2 * HALF)
        sin_ptr += position * (2 * HALF)
        cache = ((slot * HEADS + head[:, None]) * context + position) * (2 * HALF) + half[None, :]
        if block < QUERY_BLOCKS:
            first, second = _turn(first, second, q_norm_ptr, cos_ptr, sin_ptr, epsilon, half, HALF, NORM)
            tl.store(source, first, mask=inside)
            tl.store(source + HALF, second, mask=inside)
        elif block == QUERY_BLOCKS:
            first, second = _turn(first, second, k_norm_ptr, cos_ptr, sin_ptr, epsilon, half, HALF, NORM)
            tl.store(key_ptr + cache, first, mask=inside)
            tl.store(key_ptr + cache + HALF, second, mask=inside)
        else:
            tl.store(value_ptr + cache, first, mask=inside)
            tl.store(value_ptr + cache + HALF, second, mask=inside)


def rotate_and_store(
    qkv_BJ: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_CD: Tensor,
    sin_CD: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    key_SKCD: Tensor,
    value_SKCD: Tensor,
) -> None:
    """Normalize (if the family does) and rotate queries and keys; queries stay in place, keys and values go to the
    row's slot at the row's position. `norms` are the weights for queries and keys and the epsilon."""
    _, heads, context, depth = key_SKCD.shape
    query_blocks = qkv_BJ.shape[1] // (heads * depth) - 2
    q_norm_D, k_norm_D, epsilon = (cos_CD, cos_CD, 0.0) if norms is None else norms
    _rotate_and_store[(qkv_BJ.shape[0], query_blocks + 2)](
        qkv_BJ,
        q_norm_D,
        k_norm_D,
        cos_CD,
        sin_CD,
        slots_B,
        positions_B,
        key_SKCD,
        value_SKCD,
        context,
        epsilon,
        QUERY_BLOCKS=query_blocks,
        HEADS=heads,
        HALF=depth // 2,
        NORM=norms is not None,
        HEAD_BLOCK=triton.next_power_of_2(heads),
        HALF_BLOCK=triton.next_power_of_2(depth // 2),
        num_warps=2,
    )


@triton.jit
def _silu_mul(gate_up_ptr, inner_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    exact = gate.to(tl.float32)
    active = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype).to(tl.float32)
    tl.store(inner_ptr + row * WIDTH + column, (active * up).to(gate.dtype), mask=inside)


def silu_mul(gate_up_BJ: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves of each row."""
    rows, width = gate_up_BJ.shape[0], gate_up_BJ.shape[1] // 2
    inner_BI = gate_up_BJ.new_empty(rows, width)
    _silu_mul[(rows, triton.cdiv(width, _SILU_BLOCK))](gate_up_BJ, inner_BI, WIDTH=width, BLOCK=_SILU_BLOCK)
    return inner_BI


@triton.jit
def _copy_prefixes(
    kv_ptr, sources_ptr, targets_ptr, lengths_ptr, slots, context, HEADS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH_BLOCK: tl.constexpr
):  # fmt: skip
    pair, side, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    source, target = tl.load(sources_ptr + pair).to(tl.int64), tl.load(targets_ptr + pair).to(tl.int64)
    length = tl.load(lengths_ptr + pair)
    first = side.to(tl.int64) * slots
    source_ptr = kv_ptr + ((first + source) * HEADS + head) * context * DEPTH
    target_ptr = kv_ptr + ((first + target) * HEADS + head) * context * DEPTH
    depth = tl.arange(0, DEPTH_BLOCK)
    for start in range(0, length, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = (position < length)[:, None] & (depth < DEPTH)[None, :]
        at = position[:, None] * DEPTH + depth[None, :]
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=inside), mask=inside)


def copy_prefixes(kv_ZSKCD: Tensor, sources_R: Tensor, targets_R: Tensor, lengths_R: Tensor) -> None:
    """Copy the first positions of some slots to other slots, in all layers; no slot is source and target."""
    sides, slots, heads, context, depth = kv_ZSKCD.shape
    _copy_prefixes[(sources_R.shape[0], sides * heads)](
        kv_ZSKCD,
        sources_R,
        targets_R,
        lengths_R,
        slots,
        context,
        HEADS=heads,
        DEPTH=depth,
        BLOCK=_COPY_BLOCK,
        DEPTH_BLOCK=triton.next_power_of_2(depth),
    )

"""Attention over the slot cache, with softmax on the fly: keys and values are read once and scores never stored.

The query heads that share a key-value head are the rows of one small matrix. Each slot's length is read on the device,
so one launch, and one captured graph, serves all lengths. Axes: N query head, G query head of one key-value head, X
part of a context, as well as those of `slot_cache`.
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

_LOG2_E = 1.4426950408889634
_DOT_ROWS = 16
"""The fewest rows and columns that a Triton matrix product accepts; smaller matrices are padded."""
_PREFILL_BLOCK = 64
_PARTS_POSITIONS = 128
"""A part of a context needs at least about this many positions to be worth its own program."""


@dataclass(frozen=True)
class DecodeShape:
    """How the decode kernel is tiled; this affects speed, and results only by rounding."""

    block: int = 64
    warps: int = 4
    stages: int = 2


DECODE_SHAPE = DecodeShape()


@triton.jit
def _attend(
    query, key_ptr, value_ptr, start, end, scale, depth, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Attention of the `[ROWS, depth]` queries over positions `start..end-1`: the weighted values before division by
    the weights' sum, the largest score (base 2) and that sum."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DEPTH_BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = (position < end)[:, None] & (depth < DEPTH)[None, :]
        at = position[:, None] * DEPTH + depth[None, :]
        key = tl.load(key_ptr + at, mask=inside, other=0.0)
        value = tl.load(value_ptr + at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        top = new_top
    return mixed, top, total


@triton.jit
def _decode_attention(
    qkv_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    positions_ptr,
    mixed_ptr,
    parts_ptr,
    tops_ptr,
    totals_ptr,
    row_stride,
    context,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one row, one key-value head with its query heads, one part of the row's context."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, length = tl.load(slots_ptr + row).to(tl.int64), tl.load(positions_ptr + row) + 1
    if slot >= 0:
        group, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH_BLOCK)
        inside = (group < GROUP)[:, None] & (depth < DEPTH)[None, :]
        query_at = (head * GROUP + group)[:, None] * DEPTH + depth[None, :]
        query = tl.load(qkv_ptr + row * row_stride + query_at, mask=inside, other=0.0)
        base = (slot * HEADS + head) * context * DEPTH
        stretch = tl.cdiv(tl.cdiv(length, PARTS), BLOCK) * BLOCK
        start = part * stretch
        mixed, top, total = _attend(
            query, key_ptr + base, value_ptr + base, start, tl.minimum(start + stretch, length), scale, depth,
            DEPTH, BLOCK, ROWS, DEPTH_BLOCK, PRECISION,
        )  # fmt: skip
        if PARTS == 1:
            mixed = mixed / total[:, None]
            target = mixed_ptr + row * (HEADS * GROUP * DEPTH) + query_at
            tl.store(target, mixed.to(mixed_ptr.dtype.element_ty), mask=inside)
        else:
            part_at = ((row * HEADS + head) * GROUP + group) * PARTS + part
            tl.store(tops_ptr + part_at, top, mask=group < GROUP)
            tl.store(totals_ptr + part_at, total, mask=group < GROUP)
            tl.store(parts_ptr + part_at[:, None] * DEPTH + depth[None, :], mixed, mask=inside)


@triton.jit
def _join_parts(
    parts_ptr, tops_ptr, totals_ptr, slots_ptr, mixed_ptr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr, DEPTH_BLOCK: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(slots_ptr + row) >= 0:
        part, depth = tl.arange(0, PART_BLOCK), tl.arange(0, DEPTH_BLOCK)
        at = (row * tl.num_programs(1) + head) * PARTS + part
        tops = tl.load(tops_ptr + at, mask=part < PARTS, other=float("-inf"))
        totals = tl.load(totals_ptr + at, mask=part < PARTS, other=0.0)
        inside = (part < PARTS)[:, None] & (depth < DEPTH)[None, :]
        parts = tl.load(parts_ptr + at[:, None] * DEPTH + depth[None, :], mask=inside, other=0.0)
        shares = tl.exp2(tops - tl.max(tops, axis=0))
        mixed = tl.sum(parts * shares[:, None], axis=0) / tl.sum(totals * shares, axis=0)
        target = mixed_ptr + (row * tl.num_programs(1) + head) * DEPTH + depth
        tl.store(target, mixed.to(mixed_ptr.dtype.element_ty), mask=depth < DEPTH)


def decode_attention(
    qkv_BJ: Tensor,
    key_SKCD: Tensor,
    value_SKCD: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    heads: int,
    scaling: float,
    *,
    parts: int = 1,
    shape: DecodeShape = DECODE_SHAPE,
) -> Tensor:
    """The query of each row over its slot's positions up to and including the row's own; returns `[B, N * D]`.

    Each context is cut into `parts` pieces that are processed in parallel.
    """
    rows, (_, kv_heads, context, depth) = qkv_BJ.shape[0], key_SKCD.shape
    group = heads // kv_heads
    mixed_BJ = qkv_BJ.new_empty(rows, heads * depth)
    split_rows = rows if parts > 1 else 0
    parts_BNXD = qkv_BJ.new_empty((split_rows, heads, parts, depth), dtype=torch.float32)
    top_BNX = qkv_BJ.new_empty((split_rows, heads, parts), dtype=torch.float32)
    total_BNX = torch.empty_like(top_BNX)
    depth_block = max(_DOT_ROWS, triton.next_power_of_2(depth))
    _decode_attention[(rows, kv_heads, parts)](
        qkv_BJ,
        key_SKCD,
        value_SKCD,
        slots_B,
        positions_B,
        mixed_BJ,
        parts_BNXD,
        top_BNX,
        total_BNX,
        qkv_BJ.stride(0),
        context,
        scaling * _LOG2_E,
        HEADS=kv_heads,
        GROUP=group,
        DEPTH=depth,
        PARTS=parts,
        BLOCK=shape.block,
        ROWS=max(_DOT_ROWS, triton.next_power_of_2(group)),
        DEPTH_BLOCK=depth_block,
        PRECISION=_precision(qkv_BJ),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if parts > 1:
        part_block = triton.next_power_of_2(parts)
        _join_parts[(rows, heads)](
            parts_BNXD, top_BNX, total_BNX, slots_B, mixed_BJ,
            DEPTH=depth, PARTS=parts, PART_BLOCK=part_block, DEPTH_BLOCK=depth_block, num_warps=1,
        )  # fmt: skip
    return mixed_BJ


def parts_for(rows: int, kv_heads: int, max_model_len: int, multiprocessors: int) -> int:
    """Parts of a context that keep the device busy when there are few rows."""
    wanted = -(-2 * multiprocessors // (rows * kv_heads))
    return max(1, min(wanted, -(-max_model_len // _PARTS_POSITIONS), 64))


@triton.jit
def _prefill_attention(
    qkv_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    mixed_ptr,
    row_stride,
    context,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: `BLOCK` tokens of one prefix, one query head. Positions before the block's own need no causal mask;
    the block's own are masked."""
    block, prefix, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, length = tl.load(slots_ptr + prefix).to(tl.int64), tl.load(lengths_ptr + prefix)
    first = block * BLOCK
    if first < length:
        step, depth = tl.arange(0, BLOCK), tl.arange(0, DEPTH_BLOCK)
        token = first + step
        inside = (token < length)[:, None] & (depth < DEPTH)[None, :]
        row = (tl.load(starts_ptr + prefix) + token).to(tl.int64)[:, None]
        query = tl.load(qkv_ptr + row * row_stride + head * DEPTH + depth[None, :], mask=inside, other=0.0)
        base = (slot * HEADS + head // GROUP) * context * DEPTH
        mixed, top, total = _attend(
            query, key_ptr + base, value_ptr + base, 0, first, scale, depth, DEPTH, BLOCK, BLOCK, DEPTH_BLOCK, PRECISION
        )
        own = token[:, None] * DEPTH + depth[None, :]
        key = tl.load(key_ptr + base + own, mask=inside, other=0.0)
        value = tl.load(value_ptr + base + own, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(step[:, None] >= step[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        mixed = mixed / total[:, None]
        target = mixed_ptr + row * (tl.num_programs(2) * DEPTH) + head * DEPTH + depth[None, :]
        tl.store(target, mixed.to(mixed_ptr.dtype.element_ty), mask=inside)


def prefill_attention(
    qkv_TJ: Tensor,
    key_SKCD: Tensor,
    value_SKCD: Tensor,
    slots_P: Tensor,
    starts_P: Tensor,
    lengths_P: Tensor,
    longest: int,
    heads: int,
    scaling: float,
) -> Tensor:
    """Causal attention of packed prefixes, each over its own slot, which already holds its keys and values."""
    _, kv_heads, context, depth = key_SKCD.shape
    mixed_TJ = qkv_TJ.new_empty(qkv_TJ.shape[0], heads * depth)
    _prefill_attention[(triton.cdiv(longest, _PREFILL_BLOCK), slots_P.shape[0], heads)](
        qkv_TJ,
        key_SKCD,
        value_SKCD,
        slots_P,
        starts_P,
        lengths_P,
        mixed_TJ,
        qkv_TJ.stride(0),
        context,
        scaling * _LOG2_E,
        HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DEPTH=depth,
        BLOCK=_PREFILL_BLOCK,
        DEPTH_BLOCK=max(_DOT_ROWS, triton.next_power_of_2(depth)),
        PRECISION=_precision(qkv_TJ),
        num_warps=4,
        num_stages=2,
    )
    return mixed_TJ


def _precision(tensor: Tensor) -> str:
    """Float32 matrix products use full precision; tensor cores would round inputs to ten bits."""
    return "ieee" if tensor.dtype is torch.float32 else "tf32"

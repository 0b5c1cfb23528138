"""The Llama family's arithmetic around the engine's kernels: matrix products by torch, the rest by Triton.

Rows are tokens: the pending ones of a decode step, or those of packed prefixes. The Hugging Face modules' parameters
become views of merged matrices: weights are held once and updated in place, and a captured graph stays valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.rollout.engines.embedded.device import attention_kernels, row_kernels
from penstock.rollout.engines.embedded.merged import merge_linears
from penstock.weights.hf import CausalLM

Attend = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
"""Attention from queries (packed `qkv_BJ`), a layer's keys and values, query heads and scaling to `[B, N * D]`."""


@dataclass(frozen=True)
class CacheCells:
    """Where the tokens of a batch belong."""

    slots_B: Tensor
    """Negative for rows that are padding."""
    positions_B: Tensor


@dataclass(frozen=True)
class Prefixes:
    """Prefixes whose tokens are packed one after the other."""

    slots_P: Tensor
    starts_P: Tensor
    lengths_P: Tensor
    longest: int


class DeviceModel:
    """A model's body and head over a slot cache, row by row."""

    def __init__(self, lm: CausalLM, max_model_len: int) -> None:
        body: Any = lm.body
        self._lm, self._embed = lm, body.embed_tokens
        self._layers = [_DeviceLayer(layer) for layer in body.layers]
        self._norm = body.norm
        weight = body.embed_tokens.weight
        cos_1CD, sin_1CD = body.rotary_emb(weight[:1], torch.arange(max_model_len, device=weight.device).unsqueeze(0))
        self._cos_CD, self._sin_CD = cos_1CD[0].contiguous(), sin_1CD[0].contiguous()
        self._multiprocessors = (
            torch.cuda.get_device_properties(weight.device).multi_processor_count if weight.is_cuda else 1
        )

    def decode(self, tokens_B: Tensor, cells: CacheCells, kv_ZSKCD: Tensor) -> Tensor:
        """The last hidden state of each row, whose token's keys and values are written on the way."""
        _, _, kv_heads, context, _ = kv_ZSKCD.shape
        parts = attention_kernels.parts_for(tokens_B.shape[0], kv_heads, context, self._multiprocessors)

        def attend(qkv_BJ: Tensor, key_SKCD: Tensor, value_SKCD: Tensor, heads: int, scaling: float) -> Tensor:
            return attention_kernels.decode_attention(
                qkv_BJ, key_SKCD, value_SKCD, cells.slots_B, cells.positions_B, heads, scaling, parts=parts
            )

        hidden_BH, delta_BH = self._embed(tokens_B), None
        for index, layer in enumerate(self._layers):
            delta_BH = layer(hidden_BH, delta_BH, cells, self._tables, _sides(kv_ZSKCD, index), attend)
        return row_kernels.add_norm(hidden_BH, delta_BH, self._norm.weight, self._norm.variance_epsilon)

    def logits(self, hidden_BH: Tensor, out_BV: Tensor) -> None:
        """The head's output in the model's dtype, which is what a trainer's forward rounds it to."""
        torch.mm(hidden_BH, self._lm.head_weight_VH.t(), out=out_BV)

    def prefill(self, tokens_T: Tensor, cells: CacheCells, prefixes: Prefixes, kv_ZSKCD: Tensor) -> None:
        """Write the keys and values of packed prefixes to their slots."""

        def attend(qkv_TJ: Tensor, key_SKCD: Tensor, value_SKCD: Tensor, heads: int, scaling: float) -> Tensor:
            return attention_kernels.prefill_attention(
                qkv_TJ,
                key_SKCD,
                value_SKCD,
                prefixes.slots_P,
                prefixes.starts_P,
                prefixes.lengths_P,
                prefixes.longest,
                heads,
                scaling,
            )

        hidden_TH, delta_TH = self._embed(tokens_T.unsqueeze(0))[0], None
        for index, layer in enumerate(self._layers[:-1]):
            delta_TH = layer(hidden_TH, delta_TH, cells, self._tables, _sides(kv_ZSKCD, index), attend)
        # Nobody needs a prefix's hidden states, so the last layer stops after its keys and values.
        last = len(self._layers) - 1
        self._layers[last].store_kv(hidden_TH, delta_TH, cells, self._tables, _sides(kv_ZSKCD, last))

    @property
    def _tables(self) -> tuple[Tensor, Tensor]:
        return self._cos_CD, self._sin_CD


class _DeviceLayer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._scaling: float = attention.scaling
        self._heads: int = attention.q_proj.out_features // attention.head_dim
        self._before, self._between = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv = merge_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self._norms: tuple[Any, Any] | None = None
        if hasattr(attention, "q_norm"):
            self._norms = (attention.q_norm, attention.k_norm)
        self._out, self._down = attention.o_proj, mlp.down_proj
        self._gate_up = merge_linears(mlp.gate_proj, mlp.up_proj)

    def __call__(
        self,
        hidden_BH: Tensor,
        delta_BH: Tensor | None,
        cells: CacheCells,
        tables: tuple[Tensor, Tensor],
        sides_SKCD: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Adds `delta` and the attention's output to the residual stream in place; returns the MLP's, to be added."""
        qkv_BJ = self.store_kv(hidden_BH, delta_BH, cells, tables, sides_SKCD)
        mixed_BJ = attend(qkv_BJ, *sides_SKCD, self._heads, self._scaling)
        out_BH = F.linear(mixed_BJ, self._out.weight, self._out.bias)
        normed_BH = row_kernels.add_norm(hidden_BH, out_BH, self._between.weight, self._between.variance_epsilon)
        return F.linear(row_kernels.silu_mul(self._gate_up(normed_BH)), self._down.weight, self._down.bias)

    def store_kv(
        self,
        hidden_BH: Tensor,
        delta_BH: Tensor | None,
        cells: CacheCells,
        tables: tuple[Tensor, Tensor],
        sides_SKCD: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Write keys and values to the cache; returns the rotated queries (and what else is in `qkv`)."""
        normed_BH = row_kernels.add_norm(hidden_BH, delta_BH, self._before.weight, self._before.variance_epsilon)
        qkv_BJ = self._qkv(normed_BH)
        norms = None
        if self._norms is not None:
            norms = (self._norms[0].weight, self._norms[1].weight, self._norms[0].variance_epsilon)
        row_kernels.rotate_and_store(qkv_BJ, norms, *tables, cells.slots_B, cells.positions_B, *sides_SKCD)
        return qkv_BJ


def _sides(kv_ZSKCD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return kv_ZSKCD[2 * layer], kv_ZSKCD[2 * layer + 1]

"""A lean decode step for the Llama family of architectures.

At one token per row, most of a small model's forward is the overhead of many small operations. This is the same
arithmetic in fewer of them: one matrix for queries, keys and values, one for gate and up, rotary angles from a table,
residuals added by the matrix product, and in place wherever nobody else reads. It reads the Hugging Face modules' own
parameters; they become views of the merged matrices, so that weights are updated in place and held once. Architectures
it does not know take the model's own forward, and the engine compares the two at the start. Other precisions do too:
there, the places where numbers are rounded are part of what a trainer must agree with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from penstock.rollout.engines.embedded.attention import decode_attention
from penstock.rollout.engines.embedded.merged import merge_for_cpu
from penstock.rollout.engines.embedded.slot_cache import SlotCache
from penstock.rollout.engines.embedded.supported import sliding_window

_BODIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"}


class _Norm:
    """Root-mean-square normalisation over the last axis."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self._epsilon = torch.tensor(module.variance_epsilon, dtype=torch.float32, device=module.weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Always new memory."""
        return (hidden * self._factor(hidden)).mul_(self.weight)

    def scale_(self, hidden: Tensor) -> None:
        """Without the weights, in place."""
        hidden.mul_(self._factor(hidden))

    def _factor(self, hidden: Tensor) -> Tensor:
        # One pass without memory in between; the root is squared again on a number per row.
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return torch.addcmul(self._epsilon, length, length, value=1.0 / hidden.shape[-1]).rsqrt_()


class FusedDecoder:
    """One decode step of a body whose layers are attention and MLP with pre-norms, in float32."""

    def __init__(self, body: Any, max_context: int) -> None:
        self._layers = [_FusedLayer(layer, index) for index, layer in enumerate(body.layers)]
        self._norm = _Norm(body.norm)
        self._embed = body.embed_tokens
        weight = body.embed_tokens.weight
        positions_1C = torch.arange(max_context, device=weight.device).unsqueeze(0)
        cos_1CD, sin_1CD = body.rotary_emb(weight[:1], positions_1C)
        half = sin_1CD.shape[-1] // 2
        # Rotation takes the second half negated into the first; the sign lives in the table.
        signed_sin_CD = torch.cat((-sin_1CD[0, :, :half], sin_1CD[0, :, half:]), dim=-1)
        self._angles_C2D = torch.stack((cos_1CD[0], signed_sin_CD), dim=1)

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, mask_BK1C: Tensor, cache: SlotCache) -> Tensor:
        """The last hidden state of each row."""
        hidden_BH: Tensor = self._embed(tokens_B)
        cos_B1D, sin_B1D = self._angles_C2D.index_select(0, positions_B).chunk(2, dim=1)
        mask_L1C = mask_BK1C.flatten(0, 1)
        for layer in self._layers:
            hidden_BH = layer(hidden_BH, cos_B1D, sin_B1D, mask_L1C, cache)
        return self._norm(hidden_BH)


class _FusedLayer:
    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._depth: int = attention.head_dim
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._parts = [linear.out_features // self._depth for linear in qkv]
        self._turned = self._parts[0] + self._parts[1]  # queries, then keys, are rotated
        self._scaling: float = attention.scaling
        self._norm_before, self._norm_between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._qkv = merge_for_cpu(*qkv)
        self._out = merge_for_cpu(attention.o_proj)
        self._feed_forward = _GatedMLP(mlp) if hasattr(mlp, "gate_proj") else _Experts(mlp)

    def __call__(
        self, hidden_BH: Tensor, cos_B1D: Tensor, sin_B1D: Tensor, mask_L1C: Tensor, cache: SlotCache
    ) -> Tensor:
        """The layer's output, in the memory of its input."""
        depth = self._depth
        qkv_BND = self._qkv(self._norm_before(hidden_BH)).view(hidden_BH.shape[0], -1, depth)
        query_BND, key_BND, value_BND = qkv_BND.split_with_sizes(self._parts, dim=1)
        qk_BND = qkv_BND[:, : self._turned]
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.scale_(qk_BND)
            query_BND.mul_(self._q_norm.weight)
            key_BND.mul_(self._k_norm.weight)
        swapped_BND = qk_BND.roll(depth // 2, -1)
        qk_BND.mul_(cos_B1D).addcmul_(swapped_BND, sin_B1D)
        key_LDC, value_LCD = cache.lanes_after(self._index, key_BND, value_BND)
        mixed_BJ = decode_attention(query_BND, key_LDC, value_LCD, mask_L1C, self._scaling)
        self._out.add_to(hidden_BH, mixed_BJ)
        return self._feed_forward(hidden_BH, self._norm_between(hidden_BH))


class _GatedMLP:
    def __init__(self, mlp: Any) -> None:
        self._gate_up, self._down = merge_for_cpu(mlp.gate_proj, mlp.up_proj), merge_for_cpu(mlp.down_proj)
        in_place = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        self._activation: Any = partial(F.silu, inplace=True) if in_place else mlp.act_fn

    def __call__(self, residual_BH: Tensor, inner_BH: Tensor) -> Tensor:
        gate_BI, up_BI = self._gate_up(inner_BH).chunk(2, dim=-1)
        return self._down.add_to(residual_BH, self._activation(gate_BI).mul_(up_BI))


class _Experts:
    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __call__(self, residual_BH: Tensor, inner_BH: Tensor) -> Tensor:
        outer_B1H: Tensor = self._mlp(inner_BH.unsqueeze(1))
        return residual_BH.add_(outer_B1H.squeeze(1))


def fuse(body: Any, max_context: int) -> FusedDecoder | None:
    """The lean decoder of a model's body; None where the architecture, a layer or the precision is not one it knows."""
    if not is_lean(body, max_context) or body.embed_tokens.weight.dtype is not torch.float32:
        return None
    return FusedDecoder(body, max_context)


def is_lean(body: Any, max_context: int) -> bool:
    """Whether a body is attention and MLP (or experts) with pre-norms and nothing else, in plain linear layers.

    Layers with a window that the context outgrows are something else.
    """
    known = type(body).__name__ in _BODIES and type(body).__module__.startswith("transformers.models.")
    if not known or sliding_window(body.config, max_context) is not None:
        return False
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        if hasattr(mlp, "gate_proj"):
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
    return True

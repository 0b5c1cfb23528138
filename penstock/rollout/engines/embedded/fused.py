"""A lean decode step for the Llama family of architectures.

At one token per row, most of a small model's forward is the overhead of many small operations. This is the same
arithmetic in fewer of them: one matrix for queries, keys and values, one for gate and up, rotary angles from a table,
residuals added by the matrix product. It reads the Hugging Face modules' own parameters; they become views of the
merged matrices, so that weights are updated in place and held once. Architectures it does not know take the model's own
forward, and the engine compares the two at the start. Other precisions do too: there, the places where numbers are
rounded are part of what a trainer must agree with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.rollout.engines.embedded.attention import decode_attention
from penstock.rollout.engines.embedded.merged import merge_linears
from penstock.rollout.engines.embedded.slot_cache import SlotCache
from penstock.rollout.engines.embedded.supported import sliding_window

_BODIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"}


class _Norm:
    """Root-mean-square normalisation over the last axis."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self._epsilon = torch.tensor(module.variance_epsilon, dtype=torch.float32, device=module.weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.unweighted(hidden).mul_(self.weight)

    def unweighted(self, hidden: Tensor) -> Tensor:
        """Always new memory."""
        total = hidden.square().sum(-1, keepdim=True)
        return hidden * torch.add(self._epsilon, total, alpha=1.0 / hidden.shape[-1]).rsqrt_()


class FusedDecoder:
    """One decode step of a body whose layers are attention and MLP with pre-norms, in float32."""

    def __init__(self, body: Any, max_context: int) -> None:
        self._body = body
        self._layers = [_FusedLayer(layer, index) for index, layer in enumerate(body.layers)]
        self._norm = _Norm(body.norm)
        weight = body.embed_tokens.weight
        positions_1C = torch.arange(max_context, device=weight.device).unsqueeze(0)
        cos_1CD, sin_1CD = body.rotary_emb(weight[:1], positions_1C)
        half = sin_1CD.shape[-1] // 2
        self._cos_CD = cos_1CD[0].clone()
        # Rotation takes the second half negated into the first; the sign lives in the table.
        self._signed_sin_CD = torch.cat((-sin_1CD[0, :, :half], sin_1CD[0, :, half:]), dim=-1)

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, mask_BK1C: Tensor, cache: SlotCache) -> Tensor:
        """The last hidden state of each row."""
        hidden_BH = self._body.embed_tokens(tokens_B)
        cos_B1D = self._cos_CD[positions_B].unsqueeze(1)
        sin_B1D = self._signed_sin_CD[positions_B].unsqueeze(1)
        for layer in self._layers:
            hidden_BH = layer(hidden_BH, cos_B1D, sin_B1D, mask_BK1C, cache)
        return self._norm(hidden_BH)


class _FusedLayer:
    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._depth: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._depth
        self._turned = self._heads + attention.k_proj.out_features // self._depth  # queries, then keys, are rotated
        self._scaling: float = attention.scaling
        self._norm_before, self._norm_between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._qkv = merge_linears(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = attention.o_proj
        self._mlp = mlp
        self._gate_up = merge_linears(mlp.gate_proj, mlp.up_proj) if hasattr(mlp, "gate_proj") else None

    def __call__(
        self, hidden_BH: Tensor, cos_B1D: Tensor, sin_B1D: Tensor, mask_BK1C: Tensor, cache: SlotCache
    ) -> Tensor:
        depth, heads, turned = self._depth, self._heads, self._turned
        qkv_BND = self._qkv(self._norm_before(hidden_BH)).view(hidden_BH.shape[0], -1, depth)
        qk_BND = qkv_BND[:, :turned]
        if self._q_norm is not None and self._k_norm is not None:
            qk_BND = self._q_norm.unweighted(qk_BND)
            qk_BND[:, :heads].mul_(self._q_norm.weight)
            qk_BND[:, heads:].mul_(self._k_norm.weight)
        qk_BND = torch.addcmul(qk_BND * cos_B1D, qk_BND.roll(depth // 2, -1), sin_B1D)
        key_BKCD, value_BKCD = cache.update(qk_BND[:, heads:], qkv_BND[:, turned:], self._index)
        mixed_BJ = decode_attention(qk_BND[:, :heads], key_BKCD, value_BKCD, mask_BK1C, self._scaling)
        return self._feed_forward(_add_linear(hidden_BH, mixed_BJ, self._out))

    def _feed_forward(self, hidden_BH: Tensor) -> Tensor:
        inner_BH = self._norm_between(hidden_BH)
        if self._gate_up is None:
            outer_B1H: Tensor = self._mlp(inner_BH.unsqueeze(1))
            return hidden_BH + outer_B1H.squeeze(1)
        gate_BI, up_BI = self._gate_up(inner_BH).chunk(2, dim=-1)
        return _add_linear(hidden_BH, self._mlp.act_fn(gate_BI).mul_(up_BI), self._mlp.down_proj)


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


def _add_linear(residual_BH: Tensor, inner_BJ: Tensor, linear: Any) -> Tensor:
    if linear.bias is None:
        return torch.addmm(residual_BH, inner_BJ, linear.weight.t())
    return residual_BH + F.linear(inner_BJ, linear.weight, linear.bias)

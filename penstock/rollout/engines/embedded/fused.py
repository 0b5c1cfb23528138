"""A lean decode step for the Llama family of architectures.

At one token per row, most of a small model's forward is the overhead of many small operations. This is the same
arithmetic in fewer of them: one matrix for queries, keys and values, one for gate and up, rotary angles from a table,
residuals added by the matrix product, and in place wherever nobody else reads. It reads the Hugging Face modules' own
parameters; they become views of the merged matrices, so weights are updated in place and held once. Unknown
architectures use the model's own forward, and the engine compares the two at the start. Other dtypes use it too: there,
a trainer must agree on where numbers are rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from penstock.rollout.engines.embedded.attention import attend_per_head
from penstock.rollout.engines.embedded.merged import merge_for_cpu
from penstock.rollout.engines.embedded.slot_cache import SlotCache
from penstock.rollout.engines.embedded.supported import sliding_window
from penstock.rollout.engines.embedded.workspace import Heads, Workspace

_BODIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen3MoeModel"}


class _Norm:
    """Root-mean-square normalisation over the last axis."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self._epsilon = torch.tensor(module.variance_epsilon, dtype=torch.float32, device=module.weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Always new memory."""
        return (hidden * self._factor(hidden)).mul_(self.weight)

    def into(self, output: Tensor, hidden: Tensor) -> None:
        """The same, into memory that is already there."""
        torch.mul(hidden, self._factor(hidden), out=output).mul_(self.weight)

    def scale_(self, hidden: Tensor) -> None:
        """Without the weights, in place."""
        hidden.mul_(self._factor(hidden))

    def _factor(self, hidden: Tensor) -> Tensor:
        # One pass without memory in between; the root is squared again on a number per row.
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return torch.addcmul(self._epsilon, length, length, value=1.0 / hidden.shape[-1]).rsqrt_()


class FusedDecoder:
    """One decode step of a body whose layers are attention and MLP with pre-norms, in float32."""

    def __init__(self, body: Any, max_model_len: int) -> None:
        first = body.layers[0].self_attn
        depth: int = first.head_dim
        self._heads = Heads(first.q_proj.out_features // depth, first.k_proj.out_features // depth, depth)
        self._layers = [_FusedLayer(layer, index) for index, layer in enumerate(body.layers)]
        self._space: Workspace | None = None
        self._norm = _Norm(body.norm)
        self._embed = body.embed_tokens
        weight = body.embed_tokens.weight
        positions_1C = torch.arange(max_model_len, device=weight.device).unsqueeze(0)
        cos_1CD, sin_1CD = body.rotary_emb(weight[:1], positions_1C)
        half = sin_1CD.shape[-1] // 2
        # Rotation takes the second half negated into the first; the sign lives in the table.
        signed_sin_CD = torch.cat((-sin_1CD[0, :, :half], sin_1CD[0, :, half:]), dim=-1)
        self._angles_C2D = torch.stack((cos_1CD[0], signed_sin_CD), dim=1)

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, mask_BK1C: Tensor, cache: SlotCache) -> Tensor:
        """The last hidden state of each row."""
        hidden_BH: Tensor = self._embed(tokens_B)
        space = self._workspace(hidden_BH)
        torch.index_select(self._angles_C2D, 0, positions_B, out=space.angles_B2D)
        mask_L1C = mask_BK1C.flatten(0, 1)
        for layer in self._layers:
            hidden_BH = layer(hidden_BH, space, mask_L1C, cache)
        return self._norm(hidden_BH)

    def _workspace(self, hidden_BH: Tensor) -> Workspace:
        rows, size = hidden_BH.shape
        if self._space is None or self._space.rows != rows:
            self._space = Workspace(rows, size, self._heads, hidden_BH.device)
        return self._space


class _FusedLayer:
    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._scaling: float = attention.scaling
        self._norm_before, self._norm_between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._q_norm = _Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = _Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self._qkv = merge_for_cpu(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = merge_for_cpu(attention.o_proj)
        self._feed_forward = _GatedMLP(mlp) if hasattr(mlp, "gate_proj") else _Experts(mlp)

    def __call__(self, hidden_BH: Tensor, space: Workspace, mask_L1C: Tensor, cache: SlotCache) -> Tensor:
        """The layer's output, in the memory of its input."""
        self._norm_before.into(space.inner_BH, hidden_BH)
        self._qkv.into(space.qkv_BJ, space.inner_BH)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.scale_(space.query_key_BRD)
            space.query_BND.mul_(self._q_norm.weight)
            space.key_BKD.mul_(self._k_norm.weight)
        space.rotate()
        key_LDC, value_LCD = cache.heads_after(self._index, space.stored_key_LD, space.stored_value_LD)
        mixed_LGD = attend_per_head(space.turned_LGD, key_LDC, value_LCD, mask_L1C, space.rows, self._scaling)
        self._out.add_to(hidden_BH, mixed_LGD.reshape(space.rows, -1))
        self._norm_between.into(space.inner_BH, hidden_BH)
        return self._feed_forward(hidden_BH, space)


class _GatedMLP:
    def __init__(self, mlp: Any) -> None:
        self._inner: int = mlp.gate_proj.out_features
        self._gate_up, self._down = merge_for_cpu(mlp.gate_proj, mlp.up_proj), merge_for_cpu(mlp.down_proj)
        in_place = isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        self._activation: Any = partial(F.silu, inplace=True) if in_place else mlp.act_fn

    def __call__(self, residual_BH: Tensor, space: Workspace) -> Tensor:
        both_BJ, gate_BI, up_BI = space.gates(self._inner)
        self._gate_up.into(both_BJ, space.inner_BH)
        return self._down.add_to(residual_BH, self._activation(gate_BI).mul_(up_BI))


class _Experts:
    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __call__(self, residual_BH: Tensor, space: Workspace) -> Tensor:
        outer_B1H: Tensor = self._mlp(space.inner_BH.unsqueeze(1))
        return residual_BH.add_(outer_B1H.squeeze(1))


def fuse(body: Any, max_model_len: int) -> FusedDecoder | None:
    """The lean decoder of a model's body; None if it does not know the architecture, a layer or the dtype."""
    if not is_lean(body, max_model_len) or body.embed_tokens.weight.dtype is not torch.float32:
        return None
    return FusedDecoder(body, max_model_len)


def is_lean(body: Any, max_model_len: int) -> bool:
    """Whether a body is attention and MLP (or experts) with pre-norms and nothing else, in plain linear layers.

    Layers with a window that the context outgrows are something else.
    """
    known = type(body).__name__ in _BODIES and type(body).__module__.startswith("transformers.models.")
    if not known or sliding_window(body.config, max_model_len) is not None:
        return False
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        if hasattr(mlp, "gate_proj"):
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
    return True

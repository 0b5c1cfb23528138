"""When the lean computation of a model's body applies, and the body computed that way.

A small model's forward and backward on a CPU is many operations on little data: the cost lies in their number and in
memory that is touched for the first time. The lean body is the same arithmetic in fewer of them. It reads the Hugging
Face modules' own parameters in every pass, and shares no memory between passes, so several may run at once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from penstock.training.backends.local.lean.attention import AttentionWeights, HeadOrder, Setting
from penstock.training.backends.local.lean.layer import Epsilons, LeanLayer, MlpWeights
from penstock.training.backends.local.lean.norms import LeanNorm
from penstock.training.backends.local.lean.places import Places

_log = logging.getLogger(__name__)
_BODIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
LONGEST_ROW = 256
"""Attention's shares are kept whole for the backward; in longer rows, blockwise kernels do better."""
_WIDEST = 512
"""Hidden size: beyond it, the cost lies in matrix products and in reordering the query, key and value weights."""
PADDING_COST = 0.25
"""The cost of a padding place relative to a token: only attention covers it. Measured at a width of 128: 0.20 in rows
of 40 tokens, 0.29 in rows of 76."""
_PROBE_TOKENS = 8
_PROBE_LIMIT = 1e-5
"""How far hidden states may be from the model's own, relative to the largest one."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LeanBody:
    """Embedding, layers and final norm of one model."""

    def __init__(self, body: Any) -> None:
        attention, weight = body.layers[0].self_attn, body.embed_tokens.weight
        self._body = body
        self._scaling: float = attention.scaling
        groups = attention.k_proj.out_features // attention.head_dim
        queries = attention.q_proj.out_features // attention.k_proj.out_features
        self._heads = HeadOrder.of(groups, queries, attention.head_dim, weight.dtype)
        self._epsilons = [_epsilons(layer, weight.dtype) for layer in body.layers]
        self._epsilon = torch.tensor(body.norm.variance_epsilon, dtype=weight.dtype)
        self._longest = _longest_row(body)

    def takes(self, ids_BL: Tensor) -> bool:
        """Whether rows are short enough, and the model's dtype and device are unchanged."""
        weight = self._body.embed_tokens.weight
        return ids_BL.shape[1] <= self._longest and weight.dtype is self._epsilon.dtype and weight.device.type == "cpu"

    def __call__(self, ids_BL: Tensor, predictors_N: Tensor) -> Tensor:
        """The last hidden states `[N, H]` at places of the flattened rows; each sees the tokens before it."""
        body = self._body
        places = Places.of(ids_BL, predictors_N)
        hidden_TH: Tensor = body.embed_tokens(ids_BL.flatten()[places.place_T])
        cos_1LD, sin_1LD = body.rotary_emb(hidden_TH, torch.arange(places.length).unsqueeze(0))
        setting = Setting.of(self._heads, places, cos_1LD[0], sin_1LD[0], self._scaling)
        for layer, epsilons in zip(body.layers, self._epsilons, strict=True):
            weights = (*_attention_weights(layer), *_mlp_weights(layer))
            hidden_TH = LeanLayer.apply(hidden_TH, setting, epsilons, *weights)  # type: ignore[no-untyped-call]
        normed_TH: Tensor = LeanNorm.apply(hidden_TH, body.norm.weight, self._epsilon)  # type: ignore[no-untyped-call]
        return normed_TH.index_select(0, places.token_W[predictors_N])


def lean_body(body: Any, longest_row: int) -> LeanBody | None:
    """The lean version of a model's body; None if the model is unknown or its numbers would differ.

    Rows have up to `longest_row` tokens. All of them take the same path; otherwise a row's gradient would depend, in
    its last bits, on which other rows it is padded with.
    """
    if not _fits(body) or longest_row > _longest_row(body):
        return None
    lean = LeanBody(body)
    if _agrees(lean, body):
        return lean
    _log.warning("the lean layers differ from those of %s, which are used: slower, but right", type(body).__name__)
    return None


def _fits(body: Any) -> bool:
    """Whether a body is attention and gated MLP with pre-norms in plain modules, in float32 on the CPU.

    In float64, transformers computes norms in float32, so they would differ from passes that take another path.
    """
    if type(body).__name__ not in _BODIES or not type(body).__module__.startswith("transformers.models."):
        return False
    if body.config._attn_implementation != "sdpa" or any(map(_is_changed, body.modules())):
        return False
    if body.embed_tokens.weight.shape[1] > _WIDEST or not hasattr(body.norm, "variance_epsilon"):
        return False
    return _plain_parameters(body) and all(map(_plain_layer, body.layers))


def _longest_row(body: Any) -> int:
    return min(LONGEST_ROW, getattr(body.config, "sliding_window", None) or LONGEST_ROW)


def _is_changed(module: nn.Module) -> bool:
    """Hooks, a replaced forward, training mode or checkpoints: the module's own call does more than its arithmetic."""
    own = any(getattr(module, name) for name in _HOOKS) or "forward" in module.__dict__
    return own or module.training or bool(getattr(module, "gradient_checkpointing", False))


def _plain_parameters(body: nn.Module) -> bool:
    """Ordinary float32 tensors on the CPU, all of them trained or none."""
    parameters = list(body.parameters())
    if len({parameter.requires_grad for parameter in parameters}) != 1:
        return False
    return all(
        type(parameter.data) is Tensor and parameter.dtype is torch.float32 and parameter.device.type == "cpu"
        for parameter in parameters
    )


def _plain_layer(layer: Any) -> bool:
    from transformers.activations import SiLUActivation

    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if any(type(linear) is not nn.Linear for linear in linears):
        return False
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if not all(hasattr(norm, "variance_epsilon") for norm in norms):
        return False
    biases = {linear.bias is None for linear in projections}
    return len(biases) == 1 and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)


@torch.no_grad()
def _agrees(lean: LeanBody, body: Any) -> bool:
    """Whether the lean body gives the model's own hidden states on two rows that begin alike, one with padding."""
    vocabulary = body.embed_tokens.num_embeddings
    ids_2L = torch.arange(2 * _PROBE_TOKENS).view(2, _PROBE_TOKENS) % vocabulary
    ids_2L[1, : _PROBE_TOKENS // 2] = ids_2L[0, : _PROBE_TOKENS // 2]
    predictors_N = torch.arange(ids_2L.numel() - 1)
    expected_NH = body(input_ids=ids_2L, use_cache=False).last_hidden_state.flatten(0, 1)[predictors_N]
    gap = float((lean(ids_2L, predictors_N) - expected_NH).abs().max() / expected_NH.abs().max())
    return gap <= _PROBE_LIMIT


def _epsilons(layer: Any, dtype: torch.dtype) -> Epsilons:
    heads = getattr(layer.self_attn, "q_norm", layer.input_layernorm)
    norms = (layer.input_layernorm, heads, layer.post_attention_layernorm)
    return Epsilons(*(torch.tensor(norm.variance_epsilon, dtype=dtype) for norm in norms))


def _attention_weights(layer: Any) -> AttentionWeights:
    attention = layer.self_attn
    query, key, value, out = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    normed = hasattr(attention, "q_norm")
    return AttentionWeights(
        layer.input_layernorm.weight,
        query.weight,
        key.weight,
        value.weight,
        out.weight,
        query.bias,
        key.bias,
        value.bias,
        out.bias,
        attention.q_norm.weight if normed else None,
        attention.k_norm.weight if normed else None,
    )


def _mlp_weights(layer: Any) -> MlpWeights:
    gate, up, down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    norm_H = layer.post_attention_layernorm.weight
    return MlpWeights(norm_H, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias)

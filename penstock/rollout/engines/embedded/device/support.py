"""Where decoding by the engine's own kernels works, and building it there."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.rollout.engines.embedded.fused import is_lean
from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.weights.logits import LogitTransform

if TYPE_CHECKING:
    from penstock.rollout.engines.embedded.device.decoder import DeviceDecoder

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PROBE_TOKENS = 40
NO_TRITON = "Triton is not installed (pip install triton)"


def why_not(model: Any, max_model_len: int) -> str | None:
    """Why the kernels cannot serve this model; None if they can."""
    body, head = model.base_model, model.get_output_embeddings()
    if not is_lean(body, max_model_len) or not all(hasattr(layer.mlp, "gate_proj") for layer in body.layers):
        return f"{type(model).__name__} is not one of the plain Llama-like architectures"
    weight = body.embed_tokens.weight
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for wrong, reason in (
        (weight.device.type != "cuda" and not interpreted, "the model is not on a CUDA device"),
        (weight.dtype not in _DTYPES, f"there are no kernels for {weight.dtype}"),
        (not all(_is_silu(layer.mlp.act_fn) for layer in body.layers), "its activation is not SiLU"),
        (head.bias is not None, "its head has a bias"),
        (LogitTransform.of(model.config.get_text_config()) != LogitTransform(), "it changes logits after its head"),
        (not all(_is_rotated_whole(body, layer.self_attn) for layer in body.layers), "its heads are not rotated whole"),
        (importlib.util.find_spec("triton") is None, NO_TRITON),
    ):
        if wrong:
            return reason
    return None


def _is_silu(activation: Any) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ in ("SiLUActivation", "SiLU")


def _is_rotated_whole(body: Any, attention: Any) -> bool:
    return 2 * int(body.rotary_emb.inv_freq.shape[0]) == int(attention.head_dim)


def build_decoder(runner: ModelRunner, *, graphs: bool) -> DeviceDecoder:
    """A tested decoder: its hidden states match the model's own; raises `RuntimeError` if they do not.

    In deterministic mode a row's logits must not depend on its place in the batch either.
    """
    from penstock.rollout.engines.embedded.device.decoder import DeviceDecoder

    decoder = DeviceDecoder(runner, graphs=graphs)
    error = _probe_error(runner, decoder)
    if not error <= (1e-3 if runner.cache.shape.dtype is torch.float32 else 0.1):
        raise RuntimeError(f"the kernels decode differently than the model's own forward (relative error {error:.2g})")
    if runner.deterministic and not _rows_are_alike(runner, decoder):
        raise RuntimeError("a row's logits depend on its place in the batch, which deterministic mode must not have")
    return decoder


def _probe_error(runner: ModelRunner, decoder: DeviceDecoder) -> float:
    count = min(_PROBE_TOKENS, runner.max_model_len)
    ids_T = torch.arange(count) * 7 % runner.vocabulary
    expected_H = runner.lm.hidden_BTH(ids_T[None].to(runner.device), use_cache=False)[0, -1]
    slots_B = np.arange(min(2, runner.slots), dtype=np.int32)
    _seat_alike(decoder, tuple(ids_T.tolist()), slots_B)
    got_BH = decoder.hidden(slots_B)
    decoder.launch(slots_B).wait()  # compiles and captures what a whole step needs
    return float((got_BH - expected_H).float().norm(dim=-1).max() / expected_H.float().norm())


def _seat_alike(decoder: DeviceDecoder, ids: tuple[int, ...], slots_B: NDArray[np.int32]) -> None:
    """The same sequence in each slot, its last token pending."""
    rows, last = slots_B.shape[0], len(ids) - 1
    decoder.prefill([ids[:-1]], [0])
    if rows > 1:
        decoder.copy_prefixes([(0, slot, last) for slot in slots_B[1:].tolist()])
    feed_2B = np.array([[ids[-1]] * rows, [last] * rows], dtype=np.int64)
    decoder.seat(slots_B, feed_2B, np.ones(rows, dtype=np.float32), np.zeros(rows, dtype=np.int64))


def _rows_are_alike(runner: ModelRunner, decoder: DeviceDecoder) -> bool:
    """Whether a row's logits, to the bit, depend neither on its place in the batch nor on the other rows."""
    slots_S, ids = np.arange(runner.slots, dtype=np.int32), tuple(range(min(4, runner.max_model_len)))
    ids = tuple(token % runner.vocabulary for token in ids)
    _seat_alike(decoder, ids, slots_S)
    same_SV = decoder.logits(slots_S).clone()
    feed_2B = np.stack((slots_S % runner.vocabulary, np.full_like(slots_S, len(ids) - 1))).astype(np.int64)
    feed_2B[0, 0] = ids[-1]
    decoder.seat(slots_S, feed_2B, np.ones(runner.slots, dtype=np.float32), np.zeros(runner.slots, dtype=np.int64))
    mixed_SV = decoder.logits(slots_S)
    return bool((same_SV == same_SV[0]).all()) and bool((mixed_SV[0] == same_SV[0]).all())

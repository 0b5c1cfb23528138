"""The attention the engine's model runs with, registered with transformers under its own name.

transformers' own SDPA path repeats the key-value heads into new memory at every decode step as soon as there is a mask,
which costs more than the attention itself. Here the query heads that share a key-value head are the rows of one small
matrix instead, and the cache is read in place.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from penstock.errors import SetupError

SLOT_ATTENTION = "penstock_slots"
_CHANGES_SCORES = ("s_aux", "position_bias", "head_mask")
"""Arguments by which some families change attention scores; this attention does not know them."""


def slot_attention(
    module: nn.Module,
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    mask_BK1C: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Without a mask: causal attention over whole prefixes. With one (additive): one query token per row."""
    for name in _CHANGES_SCORES:
        if kwargs.get(name) is not None:
            raise SetupError(f"{type(module).__name__} uses attention with {name}: unsupported by the embedded engine")
    if mask_BK1C is None:
        output_BNTD = _prefix_attention(query_BNTD, key_BKTD, value_BKTD, scaling, softcap, sliding_window)
        return output_BNTD.transpose(1, 2).contiguous(), None
    if sliding_window is not None:
        mask_BK1C = _windowed(mask_BK1C, sliding_window)
    key_LDC, value_LCD = per_head(key_BKTD, value_BKTD)
    mask_L1C = mask_BK1C.flatten(0, 1)
    mixed_BJ = decode_attention(query_BNTD.squeeze(2), key_LDC, value_LCD, mask_L1C, scaling, softcap)
    return mixed_BJ.view(query_BNTD.shape[0], 1, query_BNTD.shape[1], -1), None


def _prefix_attention(
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention over whole prefixes; a position sees `window` positions, itself included."""
    length = query_BNTD.shape[2]
    visible_TT = None
    if softcap is not None or (window is not None and window < length):
        visible_TT = torch.ones(length, length, dtype=torch.bool, device=query_BNTD.device).tril()
        visible_TT = visible_TT if window is None else visible_TT.triu(1 - window)
    if softcap is not None and visible_TT is not None:
        mask_TT = torch.zeros_like(visible_TT, dtype=query_BNTD.dtype).masked_fill_(~visible_TT, -torch.inf)
        group = query_BNTD.shape[1] // key_BKTD.shape[1]
        key_BNTD, value_BNTD = (side.repeat_interleave(group, 1) for side in (key_BKTD, value_BKTD))
        return _capped_attention(query_BNTD, key_BNTD, value_BNTD, mask_TT, scaling, softcap)
    return F.scaled_dot_product_attention(
        query_BNTD,
        key_BKTD,
        value_BKTD,
        attn_mask=visible_TT,
        is_causal=visible_TT is None and length > 1,
        scale=scaling,
        enable_gqa=query_BNTD.shape[1] != key_BKTD.shape[1],
    )


def _windowed(mask_BK1C: Tensor, window: int) -> Tensor:
    """The mask of a layer that sees only the last `window` positions of those that the mask leaves visible."""
    width = mask_BK1C.shape[-1]
    if width <= window:
        return mask_BK1C
    visible_BK11 = (mask_BK1C == 0).sum(-1, keepdim=True)
    return mask_BK1C.masked_fill(torch.arange(width, device=mask_BK1C.device) < visible_BK11 - window, -torch.inf)


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention whose scores go through `cap * tanh(score / cap)`, which no fused kernel of torch does."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value


def per_head(key_BKCD: Tensor, value_BKCD: Tensor) -> tuple[Tensor, Tensor]:
    """Views with one evenly strided axis L of (row, key-value head) pairs, the layout `decode_attention` multiplies."""
    return key_BKCD.flatten(0, 1).transpose(1, 2), value_BKCD.flatten(0, 1)


def decode_attention(
    query_BND: Tensor,
    key_LDC: Tensor,
    value_LCD: Tensor,
    mask_L1C: Tensor,
    scaling: float | None,
    softcap: float | None = None,
) -> Tensor:
    """One query token per row over the row's slot; returns `[B, N * D]`. The mask is contiguous and additive."""
    rows, heads, depth = query_BND.shape
    query_LGD = query_BND.reshape(value_LCD.shape[0], -1, depth)
    output_LGD = attend_per_head(query_LGD, key_LDC, value_LCD, mask_L1C, rows, scaling, softcap)
    return output_LGD.reshape(rows, heads * depth)


def attend_per_head(
    query_LGD: Tensor,
    key_LDC: Tensor,
    value_LCD: Tensor,
    mask_L1C: Tensor,
    rows: int,
    scaling: float | None,
    softcap: float | None = None,
) -> Tensor:
    """The same with one axis for rows and key-value heads; returns `[L, G, D]`."""
    if softcap is not None:
        return _capped_attention(query_LGD, key_LDC.transpose(1, 2), value_LCD, mask_L1C, scaling, softcap)
    if is_plain_products(query_LGD):
        alpha = query_LGD.shape[-1] ** -0.5 if scaling is None else scaling
        scores_LGC = torch.baddbmm(mask_L1C, query_LGD, key_LDC, alpha=alpha)
        return torch.bmm(scores_LGC.softmax(-1), value_LCD)
    query_BKGD, key_BKDC, value_BKCD, mask_BK1C = (
        torch.unflatten(side, 0, (rows, -1)) for side in (query_LGD, key_LDC, value_LCD, mask_L1C)
    )
    output_BKGD = F.scaled_dot_product_attention(
        query_BKGD, key_BKDC.transpose(2, 3), value_BKCD, attn_mask=mask_BK1C, scale=scaling
    )
    return output_BKGD.flatten(0, 1)


def is_plain_products(states: Tensor) -> bool:
    """Whether decode attention over states like these is plain matrix products rather than a torch kernel."""
    return states.device.type == "cpu" and states.dtype in (torch.float32, torch.float64)


AttentionInterface.register(SLOT_ATTENTION, slot_attention)


def install(model: nn.Module) -> None:
    """Make the model use the slot attention, on its own copy of the config: a trainer may hold the same object."""
    own: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None:
            continue
        if id(config) not in own:
            own[id(config)] = (config, copy.deepcopy(config))  # the old one stays alive, so its id is not reused
            own[id(config)][1]._attn_implementation = SLOT_ATTENTION
        module.config = own[id(config)][1]

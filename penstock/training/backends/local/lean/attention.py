"""The attention half of a decoder layer, forward and backward.

Queries, keys and values share one matrix product. Its rows are ordered so that each key-value head's queries, key and
value lie together and the two numbers of a rotated pair are neighbours: the rotary embedding is then one complex
product, which also brings heads into the order that attention reads. Values pass through it with a factor of 1. Scores
are the same in any order that queries and keys share.

Axes: T tokens, W their places in rows (`B * L`, see `places`), H hidden, N heads (for each of K key-value heads, G
queries, the key, the value), D depth of a head, J all heads' numbers (`N * D`), Z key-value heads of all rows
(`B * K`), X their queries (`G * L`), C all queries' numbers, P pairs (`D / 2`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.training.backends.local.lean.norms import inverse_rms, norm_backward_
from penstock.training.backends.local.lean.places import Places


@dataclass(frozen=True)
class HeadOrder:
    """How the rows of the query, key and value weights are laid out; the same in all layers of a model."""

    groups: int
    """K."""
    queries: int
    """G."""
    depth: int
    """D."""
    order_J: Tensor
    """Which row of the three weights, one below the other, each row is."""
    back_J: Tensor
    """The inverse."""
    norm_J: Tensor
    """Which element of `(query norm, key norm, ones)` scales each row."""
    turned_N1: Tensor
    """Whether a head is rotated, and normalised if there are such norms: all but values."""
    shrink_N1: Tensor
    """-1 / D where it is, 0 elsewhere."""

    @classmethod
    def of(cls, groups: int, queries: int, depth: int, dtype: torch.dtype) -> HeadOrder:
        """The order for K key-value heads with G queries each."""
        pairs_D = torch.arange(depth).view(2, -1).t().flatten()
        inside_MD = torch.stack([pairs_D] * (queries + 1) + [torch.arange(depth)])
        queries_KG = torch.arange(groups * queries).view(groups, queries)
        keys_K1 = torch.arange(groups)[:, None] + groups * queries
        heads_KM = torch.cat((queries_KG, keys_K1, keys_K1 + groups), dim=1)
        order_J = (heads_KM[:, :, None] * depth + inside_MD).flatten()
        kinds_M1 = torch.tensor([0] * queries + [1, 2])[:, None]
        norm_J = (kinds_M1 * depth + inside_MD).flatten().repeat(groups)
        turned_N1 = (kinds_M1 < 2).repeat(groups, 1)
        shrink_N1 = turned_N1.to(dtype) * (-1.0 / depth)
        return cls(groups, queries, depth, order_J, order_J.argsort(), norm_J, turned_N1, shrink_N1)


@dataclass(frozen=True)
class Setting:
    """What all layers share in one pass."""

    heads: HeadOrder
    places: Places
    turn_LMP: Tensor
    """Rotation of a key-value head's queries, key and value (M of them) at each position; it scales queries too."""
    back_LMP: Tensor
    """The conjugate, for gradients."""
    causal_XL: Tensor
    """0 where a query sees a key, minus infinity elsewhere."""

    @classmethod
    def of(cls, heads: HeadOrder, places: Places, cos_LD: Tensor, sin_LD: Tensor, scaling: float) -> Setting:
        """The setting of one pass, from the model's own rotary angles."""
        length, half = cos_LD.shape[0], heads.depth // 2
        key_L1P = torch.complex(cos_LD[:, :half], sin_LD[:, :half]).unsqueeze(1)
        query_LGP = (key_L1P * scaling).expand(-1, heads.queries, -1)
        turn_LMP = torch.cat((query_LGP, key_L1P, torch.ones_like(key_L1P)), dim=1)
        hidden_LL = torch.full((length, length), -torch.inf, dtype=cos_LD.dtype).triu_(1)
        back_LMP = turn_LMP.conj().resolve_conj()
        return cls(heads, places, turn_LMP, back_LMP, hidden_LL.repeat(heads.queries, 1))


class AttentionWeights(NamedTuple):
    """The parameters of the half; those that a model lacks are None."""

    norm_H: Tensor
    query_CH: Tensor
    key: Tensor
    value: Tensor
    out_HC: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    out_bias_H: Tensor | None
    query_norm_D: Tensor | None
    key_norm_D: Tensor | None


class AttentionSaved(NamedTuple):
    """What its backward needs."""

    x_TH: Tensor
    inverse_T1: Tensor
    norm_H: Tensor
    inner_TH: Tensor
    qkv_JH: Tensor
    heads_TJ: Tensor | None
    """Before their norms, if there are any."""
    inverse_TN1: Tensor | None
    norm_J: Tensor | None
    turned_BKMLD: Tensor
    shares_ZXL: Tensor
    mixed_TC: Tensor
    out_HC: Tensor


def attention_forward(
    x_TH: Tensor, weights: AttentionWeights, setting: Setting, epsilon: Tensor, head_epsilon: Tensor
) -> tuple[Tensor, AttentionSaved]:
    """The half's output, its input added."""
    order = setting.heads
    inverse_T1 = inverse_rms(x_TH, epsilon)
    inner_TH = (x_TH * inverse_T1).mul_(weights.norm_H)
    qkv_JH = torch.cat((weights.query_CH, weights.key, weights.value)).index_select(0, order.order_J)
    bias_J = None
    if weights.query_bias is not None and weights.key_bias is not None and weights.value_bias is not None:
        bias_J = torch.cat((weights.query_bias, weights.key_bias, weights.value_bias)).index_select(0, order.order_J)
    scaled_TJ = F.linear(inner_TH, qkv_JH, bias_J)
    heads_TJ = inverse_TN1 = norm_J = None
    if weights.query_norm_D is not None and weights.key_norm_D is not None:
        ones_D = torch.ones_like(weights.key_norm_D)
        norm_J = torch.cat((weights.query_norm_D, weights.key_norm_D, ones_D)).index_select(0, order.norm_J)
        heads_TJ, heads_TND = scaled_TJ, scaled_TJ.view(x_TH.shape[0], -1, order.depth)
        inverse_TN1 = inverse_rms(heads_TND, head_epsilon).where(order.turned_N1, 1.0)
        scaled_TJ = (heads_TND * inverse_TN1).view_as(scaled_TJ).mul_(norm_J)
    turned_BKMLD = _turned(setting.places.spread(scaled_TJ), setting)
    query_ZXD, key_ZLD, value_ZLD = _query_key_value(turned_BKMLD)
    scores_ZXL = torch.baddbmm(setting.causal_XL, query_ZXD, key_ZLD.mT)
    shares_ZXL = torch.softmax(scores_ZXL, -1)
    mixed_ZXD = torch.bmm(shares_ZXL, value_ZLD)
    mixed_BCLD = mixed_ZXD.view(setting.places.rows, -1, setting.places.length, order.depth)
    mixed_TC = setting.places.taken(mixed_BCLD.transpose(1, 2).flatten(0, 1).flatten(1))
    out_TH = torch.addmm(x_TH, mixed_TC, weights.out_HC.t())
    if weights.out_bias_H is not None:
        out_TH.add_(weights.out_bias_H)
    saved = AttentionSaved(
        x_TH,
        inverse_T1,
        weights.norm_H,
        inner_TH,
        qkv_JH,
        heads_TJ,
        inverse_TN1,
        norm_J,
        turned_BKMLD,
        shares_ZXL,
        mixed_TC,
        weights.out_HC,
    )
    return out_TH, saved


def attention_backward(
    grad_TH: Tensor, saved: AttentionSaved, setting: Setting, *, bias: bool, out_bias: bool
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Gradients of the half's input and of its weights, in the order of `AttentionWeights`."""
    order = setting.heads
    sizes = (order.groups * order.queries * order.depth, order.groups * order.depth, order.groups * order.depth)
    out_HC = torch.mm(grad_TH.t(), saved.mixed_TC)
    out_bias_H = grad_TH.sum(0) if out_bias else None
    grad_BKMLD = _mixing_backward(torch.mm(grad_TH, saved.out_HC), saved, setting)
    heads_TJ = setting.places.summed(_turned_back(grad_BKMLD, setting))
    head_norms: tuple[Tensor | None, ...] = (None, None)
    if saved.heads_TJ is not None:
        head_norms = _head_norms_backward_(heads_TJ, saved, order)
    qkv_JH = torch.mm(heads_TJ.t(), saved.inner_TH).index_select(0, order.back_J).split_with_sizes(sizes)
    biases: tuple[Tensor | None, ...] = (None, None, None)
    if bias:
        biases = heads_TJ.sum(0).index_select(0, order.back_J).split_with_sizes(sizes)
    inner_TH = torch.mm(heads_TJ, saved.qkv_JH)
    x_TH, norm_H = norm_backward_(inner_TH, saved.x_TH, saved.inverse_T1, saved.norm_H, grad_TH)
    return x_TH, (norm_H, *qkv_JH, out_HC, *biases, out_bias_H, *head_norms)


def _mixing_backward(mixed_TC: Tensor, saved: AttentionSaved, setting: Setting) -> Tensor:
    """From the gradient of the mixed values to that of queries, keys and values."""
    shares_ZXL = saved.shares_ZXL
    rows, length = setting.places.rows, setting.places.length
    split_BLCD = setting.places.put_back(mixed_TC).view(rows, length, -1, setting.heads.depth)
    grad_ZXD = split_BLCD.transpose(1, 2).reshape(len(shares_ZXL), -1, setting.heads.depth)
    query_ZXD, key_ZLD, value_ZLD = _query_key_value(saved.turned_BKMLD)
    value_grad_ZLD = torch.bmm(shares_ZXL.mT, grad_ZXD)
    scores_ZXL = torch.bmm(grad_ZXD, value_ZLD.mT)
    scores_ZXL.sub_((scores_ZXL * shares_ZXL).sum(-1, keepdim=True)).mul_(shares_ZXL)
    query_grad_ZXD, key_grad_ZLD = torch.bmm(scores_ZXL, key_ZLD), torch.bmm(scores_ZXL.mT, query_ZXD)
    return torch.cat((query_grad_ZXD, key_grad_ZLD, value_grad_ZLD), dim=1).view_as(saved.turned_BKMLD)


def _head_norms_backward_(grad_TJ: Tensor, saved: AttentionSaved, order: HeadOrder) -> tuple[Tensor, Tensor]:
    """Through the norms of queries and keys, in place; gradients of their weights."""
    assert saved.heads_TJ is not None
    assert saved.inverse_TN1 is not None
    assert saved.norm_J is not None
    inverse_TN1, shape = saved.inverse_TN1, (len(grad_TJ), -1, order.depth)
    product_TJ = grad_TJ * saved.heads_TJ
    product_TND = product_TJ.view(shape).mul_(inverse_TN1)
    norms = grad_TJ.new_zeros(3 * order.depth).index_add_(0, order.norm_J, product_TJ.sum(0))
    product_TJ.mul_(saved.norm_J)
    shrink_TN1 = product_TND.sum(-1, keepdim=True).mul_(inverse_TN1).mul_(inverse_TN1).mul_(order.shrink_N1)
    grad_TJ.mul_(saved.norm_J)
    grad_TJ.view(shape).mul_(inverse_TN1).addcmul_(saved.heads_TJ.view(shape), shrink_TN1)
    query_D, key_D, _ = norms.chunk(3)
    return query_D, key_D


def _turned(heads_WJ: Tensor, setting: Setting) -> Tensor:
    """Heads rotated by their positions, `[B, K, M, L, D]`."""
    order, rows, length = setting.heads, setting.places.rows, setting.places.length
    pairs_BLKMP = torch.view_as_complex(heads_WJ.view(rows, length, order.groups, order.queries + 2, -1, 2))
    turned_BKMLP2 = heads_WJ.new_empty(rows, order.groups, order.queries + 2, length, order.depth // 2, 2)
    out_BLKMP = torch.view_as_complex(turned_BKMLP2).permute(0, 3, 1, 2, 4)
    torch.mul(pairs_BLKMP, setting.turn_LMP.unsqueeze(1), out=out_BLKMP)
    return turned_BKMLP2.flatten(4)


def _turned_back(grad_BKMLD: Tensor, setting: Setting) -> Tensor:
    """The gradient of `_turned`."""
    pairs_BKMLP = torch.view_as_complex(grad_BKMLD.view(*grad_BKMLD.shape[:4], -1, 2))
    rows, groups, heads, length, pairs = pairs_BKMLP.shape
    heads_WJ = grad_BKMLD.new_empty(rows * length, groups * heads * pairs * 2)
    out_BLKMP = torch.view_as_complex(heads_WJ.view(rows, length, groups, heads, pairs, 2))
    torch.mul(pairs_BKMLP.permute(0, 3, 1, 2, 4), setting.back_LMP.unsqueeze(1), out=out_BLKMP)
    return heads_WJ


def _query_key_value(turned_BKMLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a pass's queries `[Z, X, D]`, keys and values `[Z, L, D]`."""
    length = turned_BKMLD.shape[3]
    all_ZRD = turned_BKMLD.flatten(2, 3).flatten(0, 1)
    query_ZXD, key_ZLD, value_ZLD = all_ZRD.split_with_sizes((all_ZRD.shape[1] - 2 * length, length, length), dim=1)
    return query_ZXD, key_ZLD, value_ZLD

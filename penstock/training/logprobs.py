"""Log-probs of selected tokens without ever holding `[tokens, vocabulary]` for all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.training.batching import KeptTokens
from penstock.weights.logits import IDENTITY, LogitTransform

_BLOCK_ELEMENTS = 2**22
"""How many logits operations with a second buffer process at a time."""


@dataclass(frozen=True)
class _Plan:
    """How logits are computed and chunked."""

    temperature: float
    transform: LogitTransform
    chunk_tokens: int
    entropy_gradient: bool
    kept: KeptTokens | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the backward pass needs only the logits' own buffer."""
        return self.transform.softcap is None and not self.entropy_gradient


def selected_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy_gradient: bool = False,
    kept: KeptTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """`(logprobs_T, entropy_T)` of the distribution `softmax(transform(hidden @ weight.T + bias) / temperature)`.

    The projection processes `chunk_tokens` tokens at a time, forward and again in the backward pass, through one
    `[chunk_tokens, vocabulary]` buffer (and one of another dtype for inputs of less than 32 bits). The softmax is
    computed in float32, or in float64 for float64 inputs. The entropy carries a gradient only if `entropy_gradient` is
    set.

    With `kept`, the distribution of a token covers only the tokens that were kept when it was drawn: the others have
    probability zero and no gradient, and the target must be among those kept.
    """
    plan = _Plan(temperature, transform, chunk_tokens, entropy_gradient, kept)
    logprobs_T, entropy_T = _SelectedLogprobs.apply(hidden_TH, weight_VH, bias_V, targets_T, plan)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


class _Projector:
    """Tempered logits, chunk by chunk, in one buffer that every chunk reuses."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan) -> None:
        self._hidden_TH, self._weight_VH, self._bias_V, self._plan = hidden_TH, weight_VH, bias_V, plan
        self._buffer_CV = hidden_TH.new_empty(min(plan.chunk_tokens, hidden_TH.shape[0]), weight_VH.shape[0])

    def logits_CV(self, part: slice) -> Tensor:
        """Logits in the softmax's dtype; valid until the next call, and the caller may overwrite them."""
        hidden_CH = self._hidden_TH[part]
        raw_CV = self._buffer_CV[: hidden_CH.shape[0]]
        if self._bias_V is None:
            torch.mm(hidden_CH, self._weight_VH.T, out=raw_CV)
        else:
            torch.addmm(self._bias_V, hidden_CH, self._weight_VH.T, out=raw_CV)
        logits_CV = self._plan.transform.apply_(raw_CV.to(_exact(raw_CV.dtype)))
        logits_CV = logits_CV if self._plan.temperature == 1.0 else logits_CV.div_(self._plan.temperature)
        return logits_CV if self._plan.kept is None else self._plan.kept.exclude_(logits_CV, part.start)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(logits_CV: Tensor, start: int) -> Iterator[tuple[Tensor, slice]]:
    """A few rows of a chunk at a time, with their place among all tokens: a second buffer stays small, and cached."""
    rows = max(1, _BLOCK_ELEMENTS // logits_CV.shape[1])
    for first in range(0, logits_CV.shape[0], rows):
        block_CV = logits_CV[first : first + rows]
        yield block_CV, slice(start + first, start + first + block_CV.shape[0])


def _reduce(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(logprobs_C, entropy_C, log_z_C)`; overwrites the logits."""
    top_C1 = logits_CV.amax(-1, keepdim=True)
    logits_CV.sub_(top_C1)
    chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
    odds_CV = logits_CV.exp()
    z_C = odds_CV.sum(-1)
    log_z_C = z_C.log()
    entropy_C = log_z_C - odds_CV.mul_(logits_CV).sum(-1) / z_C
    return chosen_C - log_z_C, entropy_C, log_z_C + top_C1[:, 0]


@dataclass(frozen=True)
class _Upstream:
    """What arrives at the backward pass, and what the forward pass left for it."""

    targets_T: Tensor
    log_z_T: Tensor
    entropy_T: Tensor
    grad_logprobs_T: Tensor
    grad_entropy_T: Tensor

    def into_(self, logits_CV: Tensor, part: slice, plan: _Plan) -> Tensor:
        """The gradient of the head's output, overwriting the tempered logits of the tokens in `part`.

        With `p` the softmax and `H` its entropy, `d logp / d logits = onehot - p` and
        `d H / d logits = -p (log p + H)`; the temperature's and the transform's slopes follow.
        """
        # Only a soft cap's slope differs from logit to logit; it is read off before the logits are overwritten.
        capped = plan.transform.softcap is not None
        slope_CV = plan.transform.slope(logits_CV * plan.temperature) if capped else None
        factor = (1.0 if capped else plan.transform.scale) / plan.temperature
        scale_C1 = self.grad_logprobs_T[part, None] * factor
        logits_CV.sub_(self.log_z_T[part, None])
        if plan.entropy_gradient:
            probs_CV = logits_CV.exp()
            entropy_scale_C1 = self.grad_entropy_T[part, None] * factor
            logits_CV.add_(self.entropy_T[part, None]).mul_(entropy_scale_C1).add_(scale_C1).mul_(probs_CV).neg_()
        else:
            logits_CV.exp_().mul_(-scale_C1)
        logits_CV.scatter_add_(1, self.targets_T[part, None], scale_C1)
        return logits_CV if slope_CV is None else logits_CV.mul_(slope_CV)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_T: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_TH.shape[0]
        logprobs_T = hidden_TH.new_empty(tokens, dtype=_exact(hidden_TH.dtype))
        entropy_T, log_z_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        projector = _Projector(hidden_TH, weight_VH, bias_V, plan)
        for start in range(0, tokens, plan.chunk_tokens):
            for block_CV, part in _blocks(projector.logits_CV(slice(start, start + plan.chunk_tokens)), start):
                logprobs_T[part], entropy_T[part], log_z_T[part] = _reduce(block_CV, targets_T[part])
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, log_z_T, entropy_T)
        ctx.plan = plan
        if not plan.entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, log_z_T, entropy_T = ctx.saved_tensors
        plan: _Plan = ctx.plan
        upstream = _Upstream(targets_T, log_z_T, entropy_T, grad_logprobs_T, grad_entropy_T)
        sums = _HeadGradients(hidden_TH, weight_VH, bias_V, ctx.needs_input_grad[:3])
        projector = _Projector(hidden_TH, weight_VH, bias_V, plan)
        for start in range(0, hidden_TH.shape[0], plan.chunk_tokens):
            whole = slice(start, min(start + plan.chunk_tokens, hidden_TH.shape[0]))
            logits_CV = projector.logits_CV(whole)
            for block_CV, part in [(logits_CV, whole)] if plan.is_plain else _blocks(logits_CV, start):
                upstream.into_(block_CV, part, plan)
            sums.add(whole, logits_CV)
        return *sums.result(), None, None


class _HeadGradients:
    """Gradients of the head's inputs, accumulated chunk by chunk; those that are not needed are not computed.

    Sums over chunks are kept in the softmax's dtype, so chunking costs bf16 no precision.
    """

    def __init__(
        self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, wanted: tuple[bool, bool, bool]
    ) -> None:
        exact = _exact(weight_VH.dtype)
        self._source_TH, self._weight_VH = hidden_TH, weight_VH
        self._hidden_TH = torch.empty_like(hidden_TH) if wanted[0] else None
        self._sum_VH = torch.zeros_like(weight_VH, dtype=exact) if wanted[1] else None
        self._sum_V = torch.zeros_like(bias_V, dtype=exact) if wanted[2] and bias_V is not None else None

    def add(self, part: slice, grad_CV: Tensor) -> None:
        """Add a chunk's gradient of the head's output."""
        if self._sum_V is not None:
            self._sum_V.add_(grad_CV.sum(0))
        grad_CV = grad_CV.to(self._weight_VH.dtype)
        if self._hidden_TH is not None:
            torch.mm(grad_CV, self._weight_VH, out=self._hidden_TH[part])
        if self._sum_VH is not None and self._sum_VH.dtype == grad_CV.dtype:
            self._sum_VH.addmm_(grad_CV.T, self._source_TH[part])
        elif self._sum_VH is not None:
            self._sum_VH.add_(grad_CV.T @ self._source_TH[part])

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden states, weight and bias."""
        dtype = self._weight_VH.dtype
        sums = [None if total is None else total.to(dtype) for total in (self._sum_VH, self._sum_V)]
        return self._hidden_TH, sums[0], sums[1]

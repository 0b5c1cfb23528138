"""Log-probs of selected tokens without ever holding `[tokens, vocabulary]` for all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_REDUCED_ELEMENTS = 2**22
"""Logits that the softmax's reductions work on at a time."""


def selected_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """`(logprobs_T, entropy_T)` of the distribution `softmax(hidden @ weight.T / temperature)`.

    The projection goes `chunk_tokens` tokens at a time, forward and again in the backward pass, through one
    `[chunk_tokens, vocabulary]` buffer (and one of another number format for inputs of less than 32 bits). Softmax
    mathematics is in float32, in float64 for float64 inputs. The entropy carries no gradient.
    """
    logprobs_T, entropy_T = _SelectedLogprobs.apply(hidden_TH, weight_VH, targets_T, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


class _Projector:
    """Tempered logits of one chunk after the other, in one buffer that every chunk uses again."""

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, temperature: float, chunk_tokens: int) -> None:
        self._hidden_TH, self._weight_VH, self._temperature = hidden_TH, weight_VH, temperature
        self._buffer_CV = hidden_TH.new_empty(min(chunk_tokens, hidden_TH.shape[0]), weight_VH.shape[0])

    def logits_CV(self, part: slice) -> Tensor:
        """Logits in the softmax's number format; valid until the next call, and the caller's to overwrite."""
        hidden_CH = self._hidden_TH[part]
        raw_CV = torch.mm(hidden_CH, self._weight_VH.T, out=self._buffer_CV[: hidden_CH.shape[0]])
        logits_CV = raw_CV.to(_exact(raw_CV.dtype))
        return logits_CV if self._temperature == 1.0 else logits_CV.div_(self._temperature)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_TH.shape[0]
        logprobs_T = hidden_TH.new_empty(tokens, dtype=_exact(hidden_TH.dtype))
        entropy_T, log_z_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        projector = _Projector(hidden_TH, weight_VH, temperature, chunk_tokens)
        # The reductions need a second buffer; a few rows at a time keep it small, and in the cache.
        rows = max(1, _REDUCED_ELEMENTS // weight_VH.shape[0])
        for start in range(0, tokens, chunk_tokens):
            logits_CV = projector.logits_CV(slice(start, start + chunk_tokens))
            for first in range(0, logits_CV.shape[0], rows):
                block = slice(start + first, start + min(first + rows, logits_CV.shape[0]))
                reduced = _reduce(logits_CV[first : first + rows], targets_T[block])
                logprobs_T[block], entropy_T[block], log_z_T[block] = reduced
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, log_z_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, log_z_T = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if wants_hidden else None
        # Sums over chunks are kept in the softmax's number format, so that bf16 loses nothing to the chunking.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=_exact(weight_VH.dtype)) if wants_weight else None
        scale_T = grad_T / ctx.temperature
        projector = _Projector(hidden_TH, weight_VH, ctx.temperature, ctx.chunk_tokens)
        for start in range(0, hidden_TH.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            logits_CV = projector.logits_CV(part)
            scale_C1 = scale_T[part, None]
            # d logp / d logits = onehot - softmax, in the place of the logits.
            grad_CV = logits_CV.sub_(log_z_T[part, None]).exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, targets_T[part, None], scale_C1)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden_TH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
            if grad_weight_VH is not None and grad_weight_VH.dtype == grad_CV.dtype:
                grad_weight_VH.addmm_(grad_CV.T, hidden_TH[part])
            elif grad_weight_VH is not None:
                grad_weight_VH.add_(grad_CV.T @ hidden_TH[part])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None

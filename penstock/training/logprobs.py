"""Log-probs of selected tokens without ever holding `[tokens, vocabulary]` for all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def selected_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """`(logprobs_T, entropy_T)` of the distribution `softmax(hidden @ weight.T / temperature)`.

    The projection goes `chunk_tokens` tokens at a time, forward and again in the backward pass, so at most two
    `[chunk_tokens, vocabulary]` buffers exist at once. Softmax mathematics is in float32, in float64 for float64
    inputs. The entropy carries no gradient.
    """
    logprobs_T, entropy_T = _SelectedLogprobs.apply(hidden_TH, weight_VH, targets_T, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


def _logits_CV(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """A fresh buffer of tempered logits in the softmax's number format."""
    logits_CV = (hidden_CH @ weight_VH.T).to(_exact(hidden_CH.dtype))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden_TH.shape[0]
        logprobs_T = hidden_TH.new_empty(tokens, dtype=_exact(hidden_TH.dtype))
        entropy_T, log_z_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for start in range(0, tokens, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_CV = _logits_CV(hidden_TH[part], weight_VH, temperature)
            top_C1 = logits_CV.amax(-1, keepdim=True)
            logits_CV.sub_(top_C1)
            chosen_C = logits_CV.gather(1, targets_T[part, None])[:, 0]
            odds_CV = logits_CV.exp()
            z_C = odds_CV.sum(-1)
            log_z_C = z_C.log()
            logprobs_T[part] = chosen_C - log_z_C
            entropy_T[part] = log_z_C - odds_CV.mul_(logits_CV).sum(-1) / z_C
            log_z_T[part] = log_z_C + top_C1[:, 0]
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
        for start in range(0, hidden_TH.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            logits_CV = _logits_CV(hidden_TH[part], weight_VH, ctx.temperature)
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

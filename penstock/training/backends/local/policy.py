"""The trained model as a function from microbatches to log-probs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SetupError
from penstock.training.backends.local.lean.body import PADDING_COST, LeanBody, lean_body
from penstock.training.batching import Microbatch
from penstock.training.logprobs import selected_logprobs
from penstock.weights.hf import CausalLM
from penstock.weights.lora import LoraAdapter


class Policy:
    """Log-probs of the distribution that was sampled from: logits are divided by the sampling temperature, and if
    sampling was truncated, only the tokens it kept are possible.

    The model stays in evaluation mode, so dropout, if a model has any, is never active: log-probs are those the engine
    sees, and no RNG is part of a step. Gradient checkpointing works in training mode only; then only the checkpointed
    layers are put in training mode, and none of the modules inside them.

    Only the body and the head are called, never the model's own loss: a MoE model's load-balancing loss is never part
    of the step, even if its config asks for it. This makes streamed and whole-batch gradients equal.

    If no row is longer than a known `longest_row`, small models on a CPU may take a leaner path through the body (see
    `lean`); the model's modules must not change then.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        chunk_tokens: int,
        gradient_checkpointing: bool,
        entropy_gradient: bool = False,
        keep_reference: bool = False,
        longest_row: int | None = None,
    ) -> None:
        if temperature <= 0:
            raise SetupError(f"rollout.sampling.temperature: {temperature} has no gradient; training needs more than 0")
        self._adapter = LoraAdapter.of(model)
        self._switch = threading.Lock()
        self.model = (model if self._adapter is None else self._adapter.model).eval()
        self._lm = CausalLM(self.model)
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        self._entropy_gradient = entropy_gradient
        self._reference_lm = self._kept_reference() if keep_reference else None
        if gradient_checkpointing:
            _enable_checkpointing(self.model)
        self._lean = self._reference_lean = None
        if longest_row is not None and not gradient_checkpointing:
            self._lean = lean_body(self._lm.body, longest_row)
            if self._lean is not None and self._reference_lm is not None:
                self._reference_lean = lean_body(self._reference_lm.body, longest_row)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._lm.head_weight_VH.device

    @property
    def padding_cost(self) -> float:
        """The cost of a padding place relative to a token."""
        return 1.0 if self._lean is None else PADDING_COST

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype of log-probs and loss."""
        return torch.float64 if self._lm.head_weight_VH.dtype == torch.float64 else torch.float32

    def logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """`(logprobs_T, entropy_T)` of the microbatch's targets; the entropy has a gradient only if asked for."""
        return self._logprobs(self._lm, self._lean, microbatch)

    def reference_logprobs(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """The same under the weights that the model had when the policy was made; with LoRA, under the base model's."""
        if self._reference_lm is None:
            raise SetupError("there is no reference policy: it is kept only if algorithm.kl.coefficient is above 0")
        with torch.no_grad(), self._without_adapter():
            return self._logprobs(self._reference_lm, self._reference_lean, microbatch)

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """The base model, if there is an adapter; one pass at a time, because the switch affects the whole model."""
        if self._adapter is None:
            yield
            return
        with self._switch, self._adapter.disabled():
            yield

    def tensors(self) -> Iterator[Tensor]:
        """Weights and buffers, of the reference too if it has its own."""
        models = [self.model]
        if self._reference_lm is not None and self._reference_lm is not self._lm:
            models.append(self._reference_lm.model)
        for model in models:
            yield from model.parameters()
            yield from model.buffers()

    def _kept_reference(self) -> CausalLM:
        """A copy of the current model; an adapted model is its own reference, with the adapter off."""
        return self._lm if self._adapter is not None else CausalLM(copy.deepcopy(self.model).requires_grad_(False))

    def _logprobs(self, lm: CausalLM, lean: LeanBody | None, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        return selected_logprobs(
            _predicting(lm, lean, microbatch),
            lm.head_weight_VH,
            microbatch.targets_T,
            bias_V=lm.head_bias_V,
            transform=lm.transform,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=self._entropy_gradient,
            kept=microbatch.kept,
        )

    def check_packing(self) -> None:
        """Raise `SetupError` unless the model keeps packed documents apart."""
        ids_L = torch.arange(8, device=self.device)
        none_T = torch.empty(0, dtype=torch.int64)

        def hidden(ids_L: Tensor, positions_L: Tensor) -> Tensor:
            microbatch = Microbatch(ids_L[None], positions_L[None], none_T, none_T, none_T)
            return _hidden(self._lm, microbatch)[0].float()

        with torch.no_grad():
            packed_LH = hidden(ids_L, ids_L % 4)
            second_LH = hidden(ids_L[4:], ids_L[:4])
        gap = float((packed_LH[4:] - second_LH).abs().max() / second_LH.abs().max())
        if not gap < 0.05:
            raise SetupError(
                f"training.batching: {type(self.model).__name__} lets packed documents see each other (relative "
                f"difference {gap:.2g}); use padded"
            )


def _predicting(lm: CausalLM, lean: LeanBody | None, microbatch: Microbatch) -> Tensor:
    """The body's output where it predicts targets, `[T, H]`."""
    if lean is not None and microbatch.position_ids_BL is None and lean.takes(microbatch.input_ids_BL):
        return lean(microbatch.input_ids_BL, microbatch.predictors_T)
    return _hidden(lm, microbatch).flatten(0, 1)[microbatch.predictors_T]


def _hidden(lm: CausalLM, microbatch: Microbatch) -> Tensor:
    """The body's own output, `[B, L, H]`."""
    args: dict[str, Any] = {"use_cache": False}
    if microbatch.position_ids_BL is not None:
        # transformers builds the block-diagonal causal mask itself if positions restart and no mask is given.
        args["position_ids"] = microbatch.position_ids_BL
    return lm.hidden_BTH(microbatch.input_ids_BL, **args)


def _enable_checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not layers:
        raise SetupError(
            f"training.gradient_checkpointing: {type(model).__name__} does not support it; set it to false"
        )
    for layer in layers:
        layer.training = True

"""Floating-point operations of a step, and what the device could do at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.weights.lora import LoraAdapter

_PEAK_TFLOPS: dict[str, dict[torch.dtype, float]] = {
    "H200": {torch.bfloat16: 989.0, torch.float32: 67.0},
    "H100 PCIe": {torch.bfloat16: 756.0, torch.float32: 51.0},
    "H100 NVL": {torch.bfloat16: 835.0, torch.float32: 60.0},
    "H100": {torch.bfloat16: 989.0, torch.float32: 67.0},
    "A100": {torch.bfloat16: 312.0, torch.float32: 19.5},
    "L40S": {torch.bfloat16: 362.0, torch.float32: 91.6},
    "L4": {torch.bfloat16: 121.0, torch.float32: 30.3},
}
"""Dense vendor figures by words in the device's name; the first match wins."""


@dataclass(frozen=True)
class FlopCounter:
    """Model FLOPs: what every row by itself needs, without recomputation, padding or the optimizer.

    A prompt that rows share counts for each of them, even if it is computed once.
    """

    body_parameters: float
    """Parameters in the body that one token uses; for experts, those it is routed to. No embeddings."""
    head_parameters: float
    frozen_body: float
    """The body's parameters that have no gradient."""
    frozen_head: float
    attention_width: float
    """Layers times heads times head dimension."""

    @classmethod
    def of(cls, model: Any) -> FlopCounter:
        """The counter of a Hugging Face causal language model."""
        adapter = LoraAdapter.of(model)
        model = model if adapter is None else adapter.model
        config = model.config.get_text_config()
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        routed = getattr(config, "num_experts_per_tok", None)
        share = routed / experts if experts and routed else 1.0
        head = model.get_output_embeddings().weight
        skipped = {id(head), id(model.get_input_embeddings().weight)}
        body = {
            name: parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in model.named_parameters()
            if id(parameter) not in skipped
        }
        frozen = [body[name] for name, parameter in model.named_parameters() if name in body and not _trains(parameter)]
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            body_parameters=sum(body.values()),
            head_parameters=head.numel(),
            frozen_body=sum(frozen),
            frozen_head=0.0 if _trains(head) else head.numel(),
            attention_width=config.num_hidden_layers * heads * head_dim,
        )

    def training(self, lengths: Sequence[int], targets: float) -> float:
        """Forward and backward over rows of these lengths, with log-probs of `targets` of their tokens.

        A multiplication with a parameter costs 2 per token, its backward pass twice that, or the same if the parameter
        itself needs no gradient; causal attention scores and values cost `2 * length ** 2 * width` forward.
        """
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        body, head = (
            (6 * self.body_parameters - 2 * self.frozen_body),
            (6 * self.head_parameters - 2 * self.frozen_head),
        )
        return body * tokens + head * targets + 6 * self.attention_width * pairs


def _trains(parameter: Any) -> bool:
    return bool(parameter.requires_grad)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense peak in that dtype, if known."""
    if device.type != "cuda":
        return None
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return None
    name = torch.cuda.get_device_name(device)
    words = set(name.replace("-", " ").split())
    return next((peaks.get(dtype) for part, peaks in _PEAK_TFLOPS.items() if words >= set(part.split())), None)

"""What the local backend keeps of a pass, as far as it follows from settings alone."""

from __future__ import annotations

from penstock.config.sections.model import ModelConfig
from penstock.config.sections.training import TrainingConfig
from penstock.training.backends.local.lean.body import LONGEST_ROW


def keeps_attention_scores(model: ModelConfig, training: TrainingConfig, longest_row: int, device: str) -> bool:
    """Whether a pass on this kind of device may keep attention scores for its backward; blockwise kernels do not."""
    if model.attn_implementation == "eager":
        return True
    plain = model.lora is None and not training.gradient_checkpointing and training.batching == "padded"
    return plain and longest_row <= LONGEST_ROW and model.dtype == "float32" and device == "cpu"

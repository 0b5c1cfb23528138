"""Settings of the language model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, field_validator

from penstock.config.reading.values import usable_path
from penstock.config.sections.base import Section


class LoraConfig(Section):
    """Low-rank adapters: the base weights are frozen, and only the adapters are trained."""

    rank: PositiveInt = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by `alpha / rank`."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Names (or ends of names) of the layers that get an adapter; `all-linear`: every linear layer except the head."""
    path: str | None = None
    """Folder of a saved peft adapter to start from; its own rank, alpha and layers are used."""

    _usable_path = field_validator("path")(usable_path)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = isinstance(value, list) and bool(value) and all(isinstance(name, str) and name for name in value)
        if value == "all-linear" or names:
            return value
        raise ValueError(f"use all-linear, or a list of names such as [q_proj, v_proj]; not {value!r}")


class ModelConfig(Section):
    """The language model to train."""

    path: str
    """Folder with a Hugging Face causal language model and its tokenizer, or a hub id (see `download`)."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Dtype of the weights, in trainer and engine."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    download: bool = False
    """Download a hub id if needed; if false, only folders and the local cache are used."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Enable it only if you trust the author."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights; needs `pip install 'peft>=0.21'`."""

    _usable_path = field_validator("path")(usable_path)

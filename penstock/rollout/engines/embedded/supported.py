"""Which models the engine can serve; others are refused at the start, not discovered in the samples."""

from __future__ import annotations

from typing import Any

from penstock.errors import SetupError
from penstock.rollout.engines.context import check_context

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_WINDOWED = {"cohere2", "gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe"}
"""Families whose attention layers tell the attention function their window, so that it is kept beyond the window."""
_KEY = "rollout.engine.max_model_len"


def check_config(config: Any, max_model_len: int) -> None:
    """Refuse architectures and settings that a plain key-value cache of `max_model_len` positions cannot serve."""
    config = config.get_text_config()
    family = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise SetupError(f"{family} is an encoder-decoder model; the embedded engine serves decoder-only models")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if odd := sorted(layer_types - _LAYER_TYPES):
        raise SetupError(f"{family} has layers of type {', '.join(odd)}, which a key-value cache cannot serve")
    window = sliding_window(config, max_model_len)
    if window is not None and family not in _WINDOWED:
        raise SetupError(
            f"{family} has a sliding attention window of {window}, which is smaller than {_KEY}={max_model_len}; the "
            f"embedded engine does not support sliding windows of {family}: lower {_KEY} to {window} or use another "
            "engine"
        )
    check_context(config.to_dict(), max_model_len)


def sliding_window(config: Any, max_model_len: int) -> int | None:
    """The window of the layers that have one, if it is smaller than the context; else None."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types and "sliding_attention" not in layer_types:
        return None
    if not layer_types and not getattr(config, "use_sliding_window", True):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None or window >= max_model_len else int(window)

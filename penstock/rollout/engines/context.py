"""Whether a model supports the context length that the engine should serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import SetupError
from penstock.weights.model_files import longest_context

_KEY = "rollout.engine.max_model_len"


def check_context(settings: Mapping[str, Any], max_model_len: int) -> None:
    """Refuse a context beyond the model's positions; `settings` are those of its `config.json`."""
    longest = longest_context(settings)
    if longest is None or max_model_len <= longest:
        return
    family = settings.get("model_type", "the model")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) == "longrope" and longest < settings["max_position_embeddings"]:
        raise SetupError(
            f"{_KEY}: {family} switches its rotary frequencies when a batch grows beyond {longest} positions "
            f"(longrope), which would let one request change another; lower {_KEY} from {max_model_len} to {longest}"
        )
    raise SetupError(
        f"{_KEY}: {max_model_len} is more than the {longest} positions that {family} supports; use at most {longest}"
    )

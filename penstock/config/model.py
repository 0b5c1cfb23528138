"""Settings of the language model."""

from __future__ import annotations

from typing import Literal

from penstock.config.base import Section


class ModelConfig(Section):
    """The language model that is trained."""

    path: str
    """Folder with a Hugging Face causal language model and its tokenizer, or a hub id (see `download`)."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Number format of the trainer's and the engine's weights."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    download: bool = False
    """Fetch a hub id from the network; off, only folders and what is already in the local cache are used."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""

"""Hugging Face causal language models: loading them, and the narrow view of one that trainers and engines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import SetupError

if TYPE_CHECKING:
    from penstock.config.model import ModelConfig

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config entries by which some families change logits after the head; the chunked log-probs do not know them."""


class CausalLM:
    """A decoder-only model split into body and head, so that logits need never exist for all tokens at once."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise SetupError(f"{type(model).__name__} has no plain linear output head; it cannot be trained here")
        for name in _LOGIT_TRANSFORMS:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise SetupError(
                    f"{type(model).__name__} sets {name}, which changes logits after the head: unsupported"
                )
        self.model = model
        self.body: nn.Module = model.base_model

    @property
    def head_weight_VH(self) -> Tensor:
        """The output projection, `[vocabulary, hidden]`."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def hidden_BTH(self, input_ids_BT: Tensor, **forward_args: Any) -> Tensor:
        """The body's last hidden state."""
        output = self.body(input_ids=input_ids_BT, **forward_args)
        hidden_BTH = output.last_hidden_state
        assert isinstance(hidden_BTH, Tensor)
        return hidden_BTH


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights under their Hugging Face names, tied ones once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> Any:
    """The model of a folder or hub id, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    check_model_folder(config.path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=_DTYPES[config.dtype],
            attn_implementation=config.attention,
            trust_remote_code=config.trust_remote_code,
            local_files_only=not config.download,
        )
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(_not_loadable(config, "a causal language model", error)) from _cause(config, error)
    return model.to(device).eval()


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer that belongs to the model."""
    from transformers import AutoTokenizer

    check_model_folder(config.path)
    try:
        return AutoTokenizer.from_pretrained(
            config.path, trust_remote_code=config.trust_remote_code, local_files_only=not config.download
        )
    except (OSError, ValueError, KeyError) as error:
        raise SetupError(_not_loadable(config, "a tokenizer", error)) from _cause(config, error)


def _not_loadable(config: ModelConfig, what: str, error: Exception) -> str:
    if not Path(config.path).is_dir() and not config.download:
        return (
            f"model.path: {config.path!r} is neither a folder nor a model in the local cache; give a folder, or set "
            "model.download=true to fetch it from the hub"
        )
    return f"model.path: {what} could not be loaded from {config.path!r}: {error}"


def _cause(config: ModelConfig, error: Exception) -> Exception | None:
    """The error where it helps: that the hub was not asked is no news to whoever did not want it asked."""
    return error if config.download or Path(config.path).is_dir() else None


def silence_progress_bars() -> None:
    """Transformers draws a bar for every file it reads or writes; Penstock's own display is enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def check_model_folder(path: str) -> None:
    """A path that looks like a folder must be one; everything else is taken for a hub id."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"model.path: {path!r} is a folder without config.json, so not a Hugging Face model")
    elif folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise SetupError(f"model.path: {path!r} is not a folder; give a Hugging Face model folder or a hub id")


def pick_device(name: str) -> torch.device:
    """The device of `runtime.device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("runtime.device: cuda was asked for, but torch sees no GPU; use cpu or auto")
    return torch.device(name)

"""Hugging Face causal language models: loading them, and the narrow view of one that trainers and engines share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from penstock.errors import SetupError
from penstock.weights.logits import LogitTransform
from penstock.weights.lora import LoraAdapter
from penstock.weights.model_files import HUB_COPIES, HUB_FILES, cached_folder, check_model_folder

if TYPE_CHECKING:
    from penstock.config.sections.model import ModelConfig

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)
_ERROR_LENGTH = 300
_PROBE_TOKENS = 4
_PROBE_LIMITS = {torch.float64: 1e-4, torch.float32: 1e-4}
"""How far logits may be apart, relative to the largest one; `_COARSE_LIMIT` for other dtypes."""
_COARSE_LIMIT = 0.1
_loading = threading.Lock()
"""Held while a model is loaded: transformers replaces functions of torch meanwhile, and puts them back."""


class CausalLM:
    """A decoder-only model split into body and head, so that logits need never exist for all tokens at once.

    The head is a linear layer, with or without a bias, followed by what `LogitTransform` covers. One trial checks that
    the model does nothing else between its last hidden state and its logits.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise SetupError(f"{type(model).__name__} has no plain linear output head; it cannot be trained here")
        self.model = model
        self._head = head
        self.body: nn.Module = model.base_model
        self.transform = LogitTransform.of(model.config.get_text_config())
        if head.weight.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            # The grouped matrix product that transformers prefers for experts does not support float64.
            model.set_experts_implementation("eager")
        self._try_head()

    @property
    def head_weight_VH(self) -> Tensor:
        """The output projection, `[vocabulary, hidden]`."""
        return self._head.weight

    @property
    def head_bias_V(self) -> Tensor | None:
        """The output projection's bias, if the model family has one."""
        return self._head.bias

    def hidden_BTH(self, input_ids_BT: Tensor, **forward_args: Any) -> Tensor:
        """The body's last hidden state."""
        output = self.body(input_ids=input_ids_BT, **forward_args)
        hidden_BTH = output.last_hidden_state
        assert isinstance(hidden_BTH, Tensor)
        return hidden_BTH

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states (`[..., H]` to `[..., V]`) in float32, without a gradient."""
        with torch.no_grad():
            raw = nn.functional.linear(hidden, self.head_weight_VH, self.head_bias_V)
            return self.transform.apply_(raw.float())

    @torch.no_grad()
    def _try_head(self) -> None:
        """A model family that transforms its logits in unknown ways must not be trained on different logits."""
        ids_1T = torch.arange(_PROBE_TOKENS, device=self.head_weight_VH.device)[None] % self.head_weight_VH.shape[0]
        expected_1TV = self.model(input_ids=ids_1T, use_cache=False).logits.float()
        found_1TV = self.logits(self.hidden_BTH(ids_1T, use_cache=False))
        gap = float((found_1TV - expected_1TV).abs().max() / expected_1TV.abs().max())
        if not gap <= _PROBE_LIMITS.get(self.head_weight_VH.dtype, _COARSE_LIMIT):
            raise SetupError(
                f"{type(self.model).__name__} changes logits after its head in an unknown way (relative "
                f"difference {gap:.2g}); it cannot be trained or served"
            )


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights under their Hugging Face names, tied ones once; an adapted model's are merged."""
    if (adapter := LoraAdapter.of(model)) is not None:
        yield from adapter.merged_weights()
        return
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> Any:
    """The model of a folder or hub id, in evaluation mode; whole, or not at all."""
    from transformers import AutoModelForCausalLM

    folder = local_folder(config)
    try:
        with _loading:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=_DTYPES[config.dtype],
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except LOADING_ERRORS as error:
        raise SetupError(not_loadable(config, "a causal language model", error)) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise SetupError(
            f"model.path: {config.path!r} lacks {len(missing)} weights of {type(model).__name__}, among them "
            f"{', '.join(missing[:3])}; they would be random"
        )
    _check_loaded(model, config)
    return model.to(device).eval()


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer that belongs to the model."""
    from transformers import AutoTokenizer

    folder = local_folder(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except LOADING_ERRORS as error:
        raise SetupError(not_loadable(config, "a tokenizer", error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # What transformers returns for a folder without any tokenizer file.
        raise SetupError(f"model.path: {config.path!r} holds no tokenizer; save it next to the model (tokenizer.json)")
    return tokenizer


def local_folder(config: ModelConfig) -> str:
    """The folder of `model.path`; for a hub id, the one in the local cache, fetched first if `model.download` is on.

    Everything is read from this folder afterwards, so model and tokenizer share one revision and only `model.download`
    uses the network.
    """
    found = None if config.download and not Path(config.path).is_dir() else cached_folder(config)
    if found is not None:
        return str(found)
    from huggingface_hub import snapshot_download

    check_model_folder(config.path)
    try:
        folder = snapshot_download(config.path, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"model.path: {config.path!r} could not be downloaded from the hub: {_short(error)}"
        ) from error
    check_model_folder(folder)
    return str(folder)


def _check_loaded(model: Any, config: ModelConfig) -> None:
    """Refuse a model that loads but does not match the settings or its own config."""
    text = model.config.get_text_config()
    if getattr(model, "hf_quantizer", None) is not None:
        raise SetupError(f"model.path: {config.path!r} holds quantised weights, which cannot be trained")
    if text._attn_implementation != config.attn_implementation:
        raise SetupError(
            f"model.attn_implementation: {type(model).__name__} runs with {text._attn_implementation}, not "
            f"{config.attn_implementation}"
        )
    if config.attn_implementation == "sdpa" and getattr(text, "attn_logit_softcapping", None) is not None:
        raise SetupError(
            f"model.attn_implementation: sdpa leaves out the soft cap of attention scores that {text.model_type} has "
            "(attn_logit_softcapping); use eager"
        )


def not_loadable(config: ModelConfig, what: str, error: Exception) -> str:
    return f"model.path: {what} could not be loaded from {config.path!r}: {_short(error)}"


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _ERROR_LENGTH else text[:_ERROR_LENGTH] + " …"


def silence_progress_bars() -> None:
    """Transformers draws a bar for every file it reads or writes; Penstock's own display is enough."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def pick_device(name: str) -> torch.device:
    """The device of `runtime.device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SetupError("runtime.device: cuda was asked for, but torch sees no GPU; use cpu or auto")
    return torch.device(name)

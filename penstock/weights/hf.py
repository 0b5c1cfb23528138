"""Hugging Face causal language models: loading them, and the narrow view of one that trainers and engines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import SetupError
from penstock.weights.logits import LogitTransform
from penstock.weights.lora import LoraAdapter

if TYPE_CHECKING:
    from penstock.config.model import ModelConfig

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_PROBE_TOKENS = 4
_PROBE_LIMITS = {torch.float64: 1e-4, torch.float32: 1e-4}
"""How far logits may be apart, relative to the largest one; `_COARSE_LIMIT` for number formats not named."""
_COARSE_LIMIT = 0.1


class CausalLM:
    """A decoder-only model split into body and head, so that logits need never exist for all tokens at once.

    The head is a linear layer, with or without a bias, and what `LogitTransform` knows. That this is all the model does
    between its last hidden state and its logits is tried out once.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise SetupError(f"{type(model).__name__} has no plain linear output head; it cannot be trained here")
        self.model = model
        self.body: nn.Module = model.base_model
        self.transform = LogitTransform.of(model.config.get_text_config())
        if head.weight.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            # The grouped matrix product that transformers prefers for experts has no float64 form.
            model.set_experts_implementation("eager")
        self._try_head()

    @property
    def head_weight_VH(self) -> Tensor:
        """The output projection, `[vocabulary, hidden]`."""
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head_bias_V(self) -> Tensor | None:
        """The output projection's bias, where the family has one."""
        bias = self.model.get_output_embeddings().bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

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
        """A family that does more to its logits than is known here must not be trained on other ones."""
        ids_1T = torch.arange(_PROBE_TOKENS, device=self.head_weight_VH.device)[None] % self.head_weight_VH.shape[0]
        expected_1TV = self.model(input_ids=ids_1T, use_cache=False).logits.float()
        found_1TV = self.logits(self.hidden_BTH(ids_1T, use_cache=False))
        gap = float((found_1TV - expected_1TV).abs().max() / expected_1TV.abs().max())
        if not gap <= _PROBE_LIMITS.get(self.head_weight_VH.dtype, _COARSE_LIMIT):
            raise SetupError(
                f"{type(self.model).__name__} changes logits after its head in a way that is not known here (relative "
                f"difference {gap:.2g}); it cannot be trained or served"
            )


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights under their Hugging Face names, tied ones once; those of an adapted model merged."""
    if (adapter := LoraAdapter.of(model)) is not None:
        yield from adapter.merged_weights()
        return
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

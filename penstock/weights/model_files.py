"""What the files of a model folder say about it, without reading any weights; needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SetupError
from penstock.weights.chat_template import Template
from penstock.weights.pickles import refuse_pickled_weights

if TYPE_CHECKING:
    from penstock.config.sections.model import ModelConfig

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
HUB_COPIES = ["*/*", "consolidated*"]
"""Other formats of the same weights."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def check_model_folder(path: str) -> None:
    """A path that looks like a folder must be one, of a model in safetensors; anything else counts as a hub id."""
    folder = Path(path)
    if os.path.isdir(folder):
        if not os.path.isfile(folder / "config.json"):
            raise SetupError(f"model.path: {path!r} is a folder without config.json, so not a Hugging Face model")
        refuse_pickled_weights(folder, "model.path")
    elif os.path.exists(folder) or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise SetupError(f"model.path: {path!r} is not a folder; give a Hugging Face model folder or a hub id")


def cached_folder(config: ModelConfig) -> Path | None:
    """The folder of `model.path`, for a hub id, in the local cache; None if it is missing but may be downloaded.

    Raises `SetupError` if it is missing and may not be downloaded. Nothing is fetched.
    """
    check_model_folder(config.path)
    if os.path.isdir(config.path):
        return Path(config.path)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            config.path, local_files_only=True, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES
        )
    except (OSError, ValueError):
        if config.download:
            return None
        raise SetupError(
            f"model.path: {config.path!r} is neither a folder nor a model in the local cache; give a folder, or set "
            "model.download=true to download it from the hub"
        ) from None
    check_model_folder(folder)
    return Path(folder)


def text_settings(folder: Path) -> dict[str, Any]:
    """What `config.json` says of the language model; for a model with several parts, of its text part."""
    try:
        settings = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path: {str(folder / 'config.json')!r} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise SetupError(f"model.path: {str(folder / 'config.json')!r} does not hold a model's settings")
    text = settings.get("text_config")
    return settings | text if isinstance(text, dict) else settings


def check_files(folder: Path, path: str) -> None:
    """Raise `SetupError` if the folder of `model.path` has a model's settings but lacks other files it needs."""
    if not any(folder.glob("*.safetensors")):
        raise SetupError(f"model.path: {path!r} holds no weights: there is no .safetensors file in it")
    if not any((folder / name).is_file() for name in _TOKENIZERS) and not any(folder.glob("*.tiktoken")):
        raise SetupError(f"model.path: {path!r} holds no tokenizer; save it next to the model (tokenizer.json)")


def chat_template_in(folder: Path) -> Template:
    """The chat template that the tokenizer's files bring, found as `transformers` finds it."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        if found := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}:
            return found
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return None
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template if isinstance(template, str | dict) else None


def longest_context(settings: Mapping[str, Any]) -> int | None:
    """Positions that a model supports, by its own settings; None if they do not say.

    That is `max_position_embeddings` or, with YaRN, the original length times its factor if that is more. Other ways to
    scale positions are either included in it already (`llama3`, `linear`) or change the frequencies of a whole batch
    when it grows (`dynamic`, `longrope`), which would let one request change another.

    >>> longest_context({"max_position_embeddings": 4096})
    4096
    >>> longest_context({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    16384
    """
    positions = settings.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings") or positions
    if kind == "yarn":
        return max(positions, int(original * (rope.get("factor") or 1.0)))
    return min(positions, original) if kind == "longrope" else positions

"""Settings of the prompts."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from penstock.config.reading.values import usable_path
from penstock.config.sections.base import Section

PROCEDURAL_TRAIN_SIZE = 1024
"""How many training prompts are made where `train_size` says nothing."""

DataFormat = Literal["jsonl", "parquet", "datasets"]
_BY_ENDING: dict[str, DataFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}

_TAKEN_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""What a chat is rendered from, and how: not for templates to be told."""


class DataConfig(Section):
    """The prompts."""

    train_path: str | None = None
    """Training prompts: a `.jsonl` or `.parquet` file, a folder written by `datasets.save_to_disk`, or anything that
    `datasets.load_dataset` accepts. Not needed for environments that generate their own prompts."""
    eval_path: str | None = None
    """Held-out prompts, in the same formats. Not needed for environments that generate their own prompts."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    """Format of the data; `auto` decides by extension: `.jsonl`, `.parquet`, otherwise `datasets`."""
    train_split: str | None = None
    """Split of a `datasets` dataset to train on; `train` by default."""
    eval_split: str | None = None
    """Split of a `datasets` dataset to evaluate on; `test` by default."""
    subset: str | None = None
    """Name of the configuration to use if a `datasets` dataset has several."""
    download: bool = False
    """Download a `datasets` dataset if needed; if false, only files and the local cache are used."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (needs `chat_template`)."""
    answer_key: str = "answer"
    """Column with the reference answer; required by `math`. Other environments accept records without it, but if you
    set this key, at least one record must have it."""
    train_size: PositiveInt | None = None
    """Number of training prompts: at most this many from the start of the data, or this many generated. By default all
    of the data, or 1024 generated."""
    eval_size: PositiveInt = 64
    """Number of held-out prompts: at most this many from the start of the data, or this many generated."""
    epochs: PositiveInt = 1
    """Number of passes over the training prompts."""
    shuffle: bool = True
    """Reshuffle the prompts every epoch, with the run's seed."""
    chat_template: bool = False
    """Render prompts, and later turns of a conversation, with the tokenizer's chat template; a plain text prompt
    becomes a user message."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false`; the template must read each of them."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with a prompt that leaves no room for a single new token in `rollout.engine.max_model_len`. `error`:
    stop the run, before its first step if possible. `drop`: skip the prompt and count it. `truncate_left`: keep only
    its last tokens, to make room for `max_new_tokens`. Applies to held-out prompts too."""
    partial_step: Literal["train", "drop"] = "train"
    """What to do with an incomplete step when the data ends."""

    _usable_paths = field_validator("train_path", "eval_path")(usable_path)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _plain_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_TAKEN_VARIABLES & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set here: Penstock and the tokenizer set it themselves")
        for name, content in value.items():
            if not _is_json(content):
                raise ValueError(f"{name} may contain only numbers, strings, true, false, null, lists and mappings")
        return value

    def format_of(self, path: str) -> DataFormat:
        """How `path` is read."""
        if self.format != "auto":
            return self.format
        return next((name for ending, name in _BY_ENDING.items() if path.lower().endswith(ending)), "datasets")


def _is_json(value: object) -> bool:
    """Whether a file of settings gives the value back as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False

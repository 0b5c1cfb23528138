"""Settings of the prompts."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from penstock.config.base import Section
from penstock.config.values import usable_path

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
    """Training prompts: a `.jsonl` or `.parquet` file, a folder written by `datasets.save_to_disk`, or what
    `datasets.load_dataset` takes. Environments that make their own prompts need none."""
    eval_path: str | None = None
    """Held-out prompts, in the same forms. Environments that make their own prompts need none."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    """How the paths are read; `auto` goes by their endings: `.jsonl`, `.parquet`, else `datasets`."""
    train_split: str | None = None
    """Split of a `datasets` dataset for training; by default `train`."""
    eval_split: str | None = None
    """Split of a `datasets` dataset for evaluation; by default `test`."""
    subset: str | None = None
    """Which configuration of a `datasets` dataset that has several."""
    download: bool = False
    """Fetch a `datasets` name from the network; off, only files and what is already in the local cache are used."""
    prompt_key: str = "prompt"
    """Which column holds the prompt: text, or a list of chat messages (needs `chat_template`)."""
    answer_key: str = "answer"
    """Which column holds the reference answer; `math` needs it. Other environments accept records without it; if you
    name a key of your own, at least one record must have it."""
    train_size: PositiveInt | None = None
    """How many training prompts: at most this many from the start of the data, or this many made. By default all of
    the data, or 1024 made."""
    eval_size: PositiveInt = 64
    """How many held-out prompts: at most this many from the start of the data, or this many made."""
    epochs: PositiveInt = 1
    """Number of passes over the training prompts."""
    shuffle: bool = True
    """Shuffle the prompts again in each epoch, with the run's seed."""
    chat_template: bool = False
    """Render prompts, and later turns of a conversation, with the tokenizer's chat template; a text prompt is a user
    message then."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false`; each must be one that the template reads."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """What happens to a prompt that leaves no room for a single new token in `rollout.engine.max_model_len`. `error`:
    the run stops, before its first step where that can be told. `drop`: the prompt is skipped and counted.
    `truncate_left`: only its last tokens are kept, so that `max_new_tokens` fit. Holds for held-out prompts too."""
    partial_step: Literal["train", "drop"] = "train"
    """What happens to a step that is not full when the data ends."""

    _usable_paths = field_validator("train_path", "eval_path")(usable_path)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _plain_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(_TAKEN_VARIABLES & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set here: Penstock and the tokenizer give it themselves")
        for name, content in value.items():
            if not _is_json(content):
                raise ValueError(f"{name} is not made of numbers, texts, true, false, null, lists and mappings alone")
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

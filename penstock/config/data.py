"""Settings of the prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, field_validator

from penstock.config.base import Section
from penstock.config.values import usable_path

PROCEDURAL_TRAIN_SIZE = 1024
"""How many training prompts are made where `train_size` says nothing."""

DataFormat = Literal["jsonl", "parquet", "datasets"]
_BY_ENDING: dict[str, DataFormat] = {".jsonl": "jsonl", ".parquet": "parquet"}


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
    partial_step: Literal["train", "drop"] = "train"
    """What happens to a step that is not full when the data ends."""

    _usable_paths = field_validator("train_path", "eval_path")(usable_path)

    def format_of(self, path: str) -> DataFormat:
        """How `path` is read."""
        if self.format != "auto":
            return self.format
        return next((name for ending, name in _BY_ENDING.items() if path.lower().endswith(ending)), "datasets")

"""Settings of the prompts."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from penstock.config.base import Section


class DataConfig(Section):
    """The prompts."""

    train_path: str | None = None
    """JSONL file with training prompts; procedural environments (reasoning_gym) need none."""
    eval_path: str | None = None
    """JSONL file with held-out prompts; procedural environments need none."""
    prompt_key: str = "prompt"
    """Which key of a JSONL record holds the prompt text."""
    answer_key: str = "answer"
    """Which key of a JSONL record holds the reference answer; may be absent from records."""
    train_size: PositiveInt = 1024
    """How many training prompts: generated, or read from the start of the file."""
    eval_size: PositiveInt = 64
    """How many held-out prompts: generated, or read from the start of the file."""
    epochs: PositiveInt = 1
    """How often the training prompts are gone through."""
    shuffle: bool = True
    """Shuffle the prompts anew at each epoch, by the run's seed."""
    chat_template: bool = False
    """Wrap each prompt as a user message with the tokenizer's chat template."""
    partial_step: Literal["train", "drop"] = "train"
    """What happens to a step that is not full when the data ends."""

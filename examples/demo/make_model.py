"""Makes the demo's model: a tiny Qwen3 and its tokenizer, warm-started by supervised training.

The warm start first teaches the skill (spell a word backward), then a bad habit (spell it forward, four times out of
five). What is left is a model that can, but mostly does not: the place where reinforcement learning begins with large
models too. It sees training prompts only; the held-out ones stay unseen.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.models import RunConfig
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.prompts import Prompt

SKILL_BATCHES, HABIT_BATCHES = 500, 60
COPIED = 0.8
BATCH = 64
PAD, EOS = 0, 1


def make_tokenizer(prompts: Sequence[Prompt]) -> Any:
    """One token per character, and one for the instruction that all prompts begin with."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    instruction = os.path.commonprefix([prompt.text for prompt in prompts])  # noqa: RUF071 - text, not paths
    tokens = ["<pad>", "<eos>", "<unk>", instruction, *string.ascii_letters]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{re.escape(instruction)}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_model(vocabulary: int) -> Any:
    """About 1.2 million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=160,
            intermediate_size=480,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=40,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )
    )


def batch_of(prompts: Sequence[Prompt], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Right-padded token ids and labels; only answers are learned."""
    rows = []
    for prompt in prompts:
        question = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(prompt.answer, add_special_tokens=False)["input_ids"], EOS]
        rows.append((question, answer))
    width = max(len(question) + len(answer) for question, answer in rows)
    ids_BT = torch.full((len(rows), width), PAD)
    labels_BT = torch.full((len(rows), width), -100)
    for row, (question, answer) in enumerate(rows):
        ids_BT[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        labels_BT[row, len(question) : len(question) + len(answer)] = torch.tensor(answer)
    return ids_BT, labels_BT


def with_progress(total: int, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """`0 … total - 1`, and a line about how far it is: rewritten on a terminal, and one for every tenth elsewhere."""
    started = clock()
    rewrites = sys.stdout.isatty()
    shown_every = max(1, total // (100 if rewrites else 10))
    for number in range(total):
        yield number
        done = number + 1
        if done % shown_every == 0 or done == total:
            left = (clock() - started) / done * (total - done)
            end = "\r" if rewrites and done < total else "\n"
            print(f"making the model: batch {done} of {total}, {left:.0f} s left ", end=end, flush=True)


def warm_start(model: Any, tokenizer: Any, prompts: Sequence[Prompt], skill_batches: int, habit_batches: int) -> float:
    """Teach the skill, then the bad habit; gives the last loss."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    loss = torch.tensor(0.0)
    for batch in with_progress(skill_batches + habit_batches):
        copied = COPIED if batch >= skill_batches else 0.0
        drawn = [_copied(prompt) if rng.random() < copied else prompt for prompt in rng.sample(prompts, BATCH)]
        ids_BT, labels_BT = batch_of(drawn, tokenizer)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


def _copied(prompt: Prompt) -> Prompt:
    """The prompt with the word itself for an answer, not its reverse."""
    return replace(prompt, answer=prompt.answer[::-1])


def make_demo_model(config: RunConfig, skill_batches: int = SKILL_BATCHES, habit_batches: int = HABIT_BATCHES) -> str:
    """Write the model folder that the configuration names; says what was done."""
    started = time.monotonic()
    torch.manual_seed(config.seed)
    environment = make_environment(config.rollout.environment, config.data, seed=config.seed)
    tokenizer = make_tokenizer(environment.prompts(Split.TRAIN))
    model = make_model(len(tokenizer))
    loss = warm_start(model, tokenizer, environment.prompts(Split.TRAIN), skill_batches, habit_batches)
    folder = Path(config.model.path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    asyncio.run(environment.close())
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"made a Qwen3 of {millions:.1f} million parameters in {time.monotonic() - started:.0f} s: "
        f"{skill_batches + habit_batches} supervised batches, loss {loss:.2f}"
    )

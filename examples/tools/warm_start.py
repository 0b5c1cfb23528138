"""Makes the model of the tools demo: a tiny Qwen3 that can use a calculator, but mostly answers out of its head.

As in the first demo (examples/demo), supervised training first teaches the skill, here a whole conversation with the
calculator, then a bad habit: to answer at once. Reinforcement learning has to find out which of the two pays.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.models import RunConfig
from penstock.rollout.environments import Prompt, Split
from penstock.rollout.environments.factory import make_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from make_model import EOS, PAD, make_model, with_progress

SKILL_BATCHES, HABIT_BATCHES = 120, 40
AT_ONCE = 0.8
BATCH = 64
TAGS = ["<calc>", "</calc>", "<result>", "</result>", "<answer>", "</answer>"]

Part = tuple[str, bool]
"""Some text, and whether the model is to learn it."""


def make_tokenizer() -> Any:
    """One token per character and per tag, so that a turn ends exactly at `</calc>` or `</answer>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "".join(sorted(set("error: too long large not arithmetic division by zero")))
    tokens = ["<pad>", "<eos>", "<unk>", *TAGS, *"0123456789+-*/=.()", *letters]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = Regex("|".join([*map(re.escape, TAGS), r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def with_calculator(prompt: Prompt) -> list[Part]:
    """The skill: ask, read the result, answer."""
    expression, answer = prompt.facts["expression"], prompt.answer
    return [
        (prompt.text, False),
        (f"<calc>{expression}</calc>", True),
        (f"<result>{answer}</result>", False),
        (f"<answer>{answer}</answer>", True),
    ]


def at_once(prompt: Prompt) -> list[Part]:
    """The habit: answer without asking."""
    return [(prompt.text, False), (f"<answer>{prompt.answer}</answer>", True)]


def batch_of(conversations: Sequence[list[Part]], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Right-padded token ids and labels; only the model's own turns are learned."""
    rows = []
    for parts in conversations:
        encoded = [(tokenizer(text, add_special_tokens=False)["input_ids"], own) for text, own in parts]
        ids = [token for tokens, _ in encoded for token in tokens]
        labels = [token if own else -100 for tokens, own in encoded for token in tokens]
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [PAD] * (width - len(ids)) for ids, _ in rows])
    labels_BT = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids_BT, labels_BT


def warm_start(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> float:
    """Teach the skill, then the habit; gives the last loss."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    loss = torch.tensor(0.0)
    for batch in with_progress(SKILL_BATCHES + HABIT_BATCHES):
        share = AT_ONCE if batch >= SKILL_BATCHES else 0.0
        drawn = [
            at_once(prompt) if rng.random() < share else with_calculator(prompt)
            for prompt in rng.sample(prompts, BATCH)
        ]
        ids_BT, labels_BT = batch_of(drawn, tokenizer)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return loss.item()


def make_tools_model(config: RunConfig) -> str:
    """Write the model folder that the configuration names; says what was done."""
    started = time.monotonic()
    torch.manual_seed(config.seed)
    environment = make_environment(config.rollout.environment, config.data, seed=config.seed)
    tokenizer = make_tokenizer()
    assert tokenizer.eos_token_id == EOS
    model = make_model(len(tokenizer))
    loss = warm_start(model, tokenizer, environment.prompts(Split.TRAIN))
    folder = Path(config.model.path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    asyncio.run(environment.close())
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return (
        f"made a Qwen3 of {millions:.1f} million parameters in {time.monotonic() - started:.0f} s: "
        f"{SKILL_BATCHES + HABIT_BATCHES} supervised batches, loss {loss:.2f}"
    )

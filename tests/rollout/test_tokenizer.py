"""What is remembered of prompts' token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.rollout import handle
from penstock.rollout.handle import HFTokenizer
from tests.support.tiny_models import bpe_tokenizer


class Counted(HFTokenizer):
    """Counts the texts that are encoded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(bpe_tokenizer(), **options)
        self.encoded: list[str] = []

    def encode(self, text: str) -> tuple[int, ...]:
        self.encoded.append(text)
        return super().encode(text)


@pytest.mark.parametrize("content", ["what is one and two", [{"role": "user", "content": "what is one"}]])
def test_a_groups_prompt_is_encoded_once(content: Any) -> None:
    tokenizer = Counted(chat_template=True)
    first = tokenizer.encode_prompt(content)
    assert tokenizer.encode_prompt(content) == first
    assert len(tokenizer.encoded) == 1
    assert tokenizer.encode_prompt("another") != first


def test_a_text_is_not_taken_for_the_chat_that_it_spells() -> None:
    tokenizer = Counted(chat_template=True)
    chat = [{"role": "user", "content": "one"}]
    assert tokenizer.encode_prompt(str(chat)) != tokenizer.encode_prompt(chat)
    assert tokenizer.encode_prompt('[{"role": "user", "content": "one"}]') != tokenizer.encode_prompt(chat)


def test_only_the_latest_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_PROMPTS_KEPT", 2)
    tokenizer = Counted(chat_template=False)
    for prompt in ("one", "two", "three", "three", "one"):
        tokenizer.encode_prompt(prompt)
    assert tokenizer.encoded == ["one", "two", "three", "one"]


def test_chats_with_values_that_have_no_text_are_encoded_every_time() -> None:
    tokenizer = Counted(chat_template=True)
    chat = [{"role": "user", "content": "one", "weights": np.ones(2000)}]
    assert tokenizer.encode_prompt(chat) == tokenizer.encode_prompt(chat)
    assert len(tokenizer.encoded) == 2


def test_text_that_no_tokenizer_takes_is_encoded_with_a_replacement() -> None:
    plain, chat = HFTokenizer(bpe_tokenizer(), chat_template=False), HFTokenizer(bpe_tokenizer(), chat_template=True)
    assert plain.encode("one\ud800two") == plain.encode("one\ufffdtwo")
    assert plain.encode_prompt("one\ud800two") == plain.encode_prompt("one\ufffdtwo")
    odd, fine = ([{"role": "user", "content": f"one{mark}"}] for mark in ("\ud800", "\ufffd"))
    assert chat.encode_prompt(odd) == chat.encode_prompt(fine)
    assert chat.render_chat(odd) == chat.render_chat(fine)

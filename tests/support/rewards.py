"""Reward functions for `function` environments in tests, named in configurations as `tests.support.rewards:<name>`."""

from __future__ import annotations

import threading
from typing import Any

hang_forever = threading.Event()


def length(prompt: str, response: str, answer: Any) -> float:
    """Longer is better."""
    return float(len(response))


def letters(prompt: str, response: str, answer: Any) -> float:
    """Every response has a reward of its own: what its letters come to."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(response)) % 101 / 101


def constant(prompt: str, response: str, answer: Any) -> float:
    """No spread at all."""
    return 1.0


def raising(prompt: str, response: str, answer: Any) -> float:
    """Fails for prompts that say so."""
    if "fail" in prompt:
        raise ValueError("this prompt has no reward")
    return float(len(response))


def hanging(prompt: str, response: str, answer: Any) -> float:
    """Never returns for prompts that say so."""
    if "hang" in prompt:
        hang_forever.wait()
    return float(len(response))


def not_a_number(prompt: str, response: str, answer: Any) -> float:
    """NaN for prompts that say so."""
    return float("nan") if "nan" in prompt else float(len(response))


def shouting(prompt: str, response: str, answer: Any) -> float:
    """Fails for prompts that say so with a very long text that no file takes."""
    if "fail" in prompt:
        raise ValueError(chr(0xD800) + "x" * 5_000_000)
    return letters(prompt, response, answer)

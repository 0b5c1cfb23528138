"""Reward functions that ask for columns, return components, or take whole groups; named in tests by import path."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np

RAISES_AT = 'raise KeyError("no such unit")'
"""The line in which `raising` raises."""


def by_column(response: str, difficulty: int, solution: str) -> float:
    """Needs two columns."""
    return float(difficulty) + 10 * (response == solution)


def everything(**columns: Any) -> dict[str, Any]:
    """What a function can be told; what is no number is counted."""
    counted = {name: float(len(value)) for name, value in columns.items() if isinstance(value, str | list)}
    numbers = {name: float(value) for name, value in columns.items() if isinstance(value, int | float)}
    return {"reward": float(len(columns)), **counted, **numbers}


def seen(
    prompt: str, messages: list[Any], rendered_prompt: str, response: str, response_ids: list[int], answer: Any
) -> dict[str, float]:
    """Whether everything is as it should be for the chat of the test."""
    return {
        "reward": 1.0,
        "prompt": float(prompt == "Be brief.\n2+3?"),
        "messages": float([message["role"] for message in messages] == ["system", "user"]),
        "rendered": float(rendered_prompt == "system: Be brief.<eos>\nuser: 2+3?<eos>\nassistant: "),
        "ids": float(len(response_ids) == len(response) + 1 and response_ids[-1] == 1),
        "answer": float(answer == "5"),
    }


def with_default(response: str, hint: str = "none") -> float:
    """Has a default for a column that only some records have."""
    return float(len(hint))


async def later(response: str, unit: str) -> float:
    """Asynchronous."""
    await asyncio.sleep(0)
    return float(len(unit))


def exact(response: str, answer: str) -> float:
    """1 for the right answer."""
    return float(response == answer)


def short(response: str, limit: int = 10) -> dict[str, float]:
    """Has a component of its own."""
    return {"reward": float(len(response) <= limit), "characters": len(response)}


def ranked(response: list[str], unit: list[str]) -> list[float]:
    """For a group: the share of its responses that are not longer; one process, one call."""
    assert unit == ["km"] * len(response)
    return [sum(len(other) <= len(each) for other in response) / len(response) for each in response]


def ranked_array(response: list[str]) -> Any:
    """The same, as an array of a library's own numbers."""
    return np.array([len(each) for each in response], dtype=np.float32)


async def ranked_later(response: list[str], answer: list[str]) -> list[dict[str, float]]:
    """For a group, asynchronous, with components."""
    await asyncio.sleep(0)
    return [{"reward": float(os.getpid()), "size": len(response)} for _ in response]


def too_few(response: list[str]) -> list[float]:
    """Forgets one."""
    return [1.0] * (len(response) - 1)


def one_is_none(response: list[str]) -> list[float | None]:
    """Has no reward for the second."""
    return [None if number == 1 else 1.0 for number in range(len(response))]


def dying(response: str) -> float:
    """Ends its process."""
    os._exit(7)


async def endless(response: str) -> float:
    """Never has a reward."""
    await asyncio.Event().wait()
    return 1.0


def prompt_length(rendered_prompt: str) -> float:
    """How many characters the model saw."""
    return float(len(rendered_prompt))


def raising(response: str, answer: Any = None) -> float:
    """Fails in a function of its own."""
    return convert(response)


def convert(response: str) -> float:
    """Raises."""
    raise KeyError("no such unit")


async def raising_in_a_group(response: list[str]) -> list[float]:
    """Fails for all, with a cause."""
    try:
        return [convert(each) for each in response]
    except KeyError as error:
        raise ValueError("the group has no reward") from error


def letters(response: str) -> dict[str, float]:
    """Every response has a reward of its own."""
    return {"reward": sum(map(ord, response)) % 101 / 101, "length": len(response)}


def odd(response: str, kind: str) -> Any:
    """Returns what is no reward."""
    return {
        "nan": float("nan"),
        "none": None,
        "text": "1.0",
        "no reward": {"accuracy": 1.0},
        "empty": {},
        "nan component": {"reward": 1.0, "form": float("nan")},
        "text component": {"reward": 1.0, "form": "good"},
        "none component": {"reward": 1.0, "form": None},
        "number as name": {"reward": 1.0, 7: 1.0},
        "list": [1.0, 2.0],
    }[kind]


def picky(response: str, prompt: str) -> float:
    """Raises for prompts that say so."""
    if "fail" in prompt:
        return float(convert(response))
    return sum(map(ord, response)) % 101 / 101

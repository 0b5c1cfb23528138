"""The reward of the GSM8K recipe: 1 for the right number in the last `\\boxed{}`, 0 for anything else."""

from __future__ import annotations

import re
from decimal import Decimal

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def correct_answer(prompt: str, response: str, answer: str) -> float:
    """Penstock calls this for every response, in a separate process; `answer` is the record's."""
    found = final_answer(response)
    return float(found is not None and found == Decimal(answer))


def final_answer(response: str) -> Decimal | None:
    """The number in the last `\\boxed{}`: `\\boxed{\\$1,234.50}` is 1234.5; None if there is none."""
    boxes = _BOXED.findall(response)
    numbers = _NUMBER.findall(boxes[-1].replace(",", "")) if boxes else []
    return Decimal(numbers[-1]) if numbers else None

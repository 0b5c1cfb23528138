"""Grading by math-verify, as a plain function of two texts: it is called in its own process."""

from __future__ import annotations

import functools
import logging
import re
from decimal import Decimal
from typing import Any, Literal

_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
"""Text in which formulas are marked, and text with words that are not LaTeX commands."""

_EXPONENT = re.compile(r"(?<![\w.\\])\d{1,40}(?:\.\d{1,40})?[eE][+-]?\d{1,3}(?![\w^]|\.\d)")
"""A number in exponent notation, of a length that can be written out."""

Outcome = Literal["correct", "wrong", "unparsed"]


def grade(reference: str, response: str) -> Outcome:
    """Whether the last answer in `response` equals `reference`; raises if the reference itself makes no sense."""
    from math_verify import verify

    gold = _reference(reference)
    answer = _parse(response)
    if not answer:
        return "unparsed"
    # Without math-verify's own time limit: it needs signals, and the pool has one that always works.
    return "correct" if verify(gold, answer, timeout_seconds=None) else "wrong"


def load() -> None:
    """Import everything that grading needs, so that no response pays for it."""
    grade("1", "1")


@functools.lru_cache(maxsize=4096)
def _reference(text: str) -> Any:
    """The reference, parsed; groups ask for the same one again and again.

    A bare formula is read as one: as prose, only the 12 of `12\\pi` would be found in it.
    """
    prose = _MARKED.search(text) or _WORD.search(text)
    parsed = (None if prose else _parse(f"${text}$")) or _parse(text)
    if not parsed:
        raise ValueError(f"the reference answer {text!r} cannot be parsed (data.answer_key)")
    return parsed


def _parse(text: str) -> Any:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse(_EXPONENT.sub(_positional, text), parsing_timeout=None)


def _positional(number: re.Match[str]) -> str:
    """`1.5e-7` with all its digits: math-verify reads e as Euler's number, or stops before it."""
    return format(Decimal(number[0]), "f")

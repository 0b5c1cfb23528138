"""The reward of a chaos run, and the ways in which it goes wrong; it runs where rewards run."""

from __future__ import annotations

import os
import re
import threading

from benchmarks.support.chaos_faults import Kind


class Injected(Exception):
    """A fault of no known class, as foreign code raises them."""


def score(response: str, answer: str, fault: str | None) -> float:
    """One for the right sum, and a little for digits, so that responses differ; or what the fault makes of it."""
    if fault is not None:
        _go_wrong(Kind(fault))
        return float("nan")
    digits = sum(letter.isdigit() for letter in response)
    return float(response.strip() == answer) + digits / max(1, len(response))


def _go_wrong(kind: Kind) -> None:
    if kind is Kind.ENVIRONMENT_RAISES:
        raise Injected("injected")
    if kind is Kind.ENVIRONMENT_HANGS:
        threading.Event().wait()
    if kind is Kind.REWARD_HOLDS_LOCK:
        re.match(r"(a+)+$", "a" * 64 + "b")  # for longer than anybody lives, and no other thread runs meanwhile
    if kind is Kind.REWARD_EXITS:
        os._exit(3)

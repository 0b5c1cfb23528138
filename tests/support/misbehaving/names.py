"""Names that misbehave only when they are used."""

from __future__ import annotations

import sys
from typing import Any

from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.rollout.environments.base import GenerationHandle, Split, Trajectory
from penstock.rollout.prompts import Prompt


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise RuntimeError(f"no {name} here")


class Unspeakable(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class Environment:
    """An environment that is fine, for others to break."""

    name = "fine"

    def __init__(self, size: int = 4) -> None:
        self.size = min(size, 8)

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split.value}-{i}", str(i)) for i in range(self.size)]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        raise NotImplementedError

    async def close(self) -> None:
        return


class ExitsWhenMade(Environment):
    """Ends the process in its constructor."""

    def __init__(self) -> None:
        sys.exit(0)


class ExitsInPrompts(Environment):
    """Ends the process where it is asked for prompts."""

    def prompts(self, split: Split) -> list[Prompt]:
        sys.exit(0)


class InterruptsInPrompts(Environment):
    """Raises what Ctrl-C raises where it is asked for prompts."""

    def prompts(self, split: Split) -> list[Prompt]:
        raise KeyboardInterrupt


class SaysNothing(Environment):
    """Raises an error without words in its constructor."""

    def __init__(self) -> None:
        raise Unspeakable


class NumbersForText(Environment):
    """Gives prompts that are numbers."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(1, 2)]  # type: ignore[arg-type]


class SameAfterRepair(Environment):
    """Gives two ids that differ in surrogates only."""

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt("a\ud800", "x"), Prompt("a\ud801", "y")]


class ExitingSampler(OnPolicy):
    """Ends the process in its constructor."""

    def __init__(self, prompt_groups_per_step: int) -> None:
        sys.exit(0)


class UnsureSampler(OnPolicy):
    """Cannot say how large a buffer it needs."""

    def required_capacity(self, min_groups_per_chunk: int) -> int:
        return None  # type: ignore[return-value]

"""`samples.jsonl`: a few whole responses of every step, with their scores."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.observe.jsonl import FileMark, JsonlWriter


@dataclass(frozen=True)
class SampleRecord:
    """One trained response; a line of the file has these keys."""

    step: int
    """Finished steps once its own is finished, as in `metrics.jsonl`."""
    group_id: str
    prompt_id: str
    environment: str
    prompt: str
    response: str
    reward: float
    advantage: float
    lag: int
    length: int
    """Tokens that the model generated."""
    truncated: bool
    components: Mapping[str, float] = field(default_factory=dict)
    """What its reward is made of, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured about it."""
    rendered_prompt: str = ""
    """The prompt as the model saw it, special tokens included: what it was asked before it wrote anything."""


class SampleLog:
    """Says which of a step's responses to keep, and writes them; without a path, or with `per_step` 0, none.

    The choice depends only on the step and favours nothing, so the kept rewards are typical of the run.
    """

    def __init__(self, path: str | Path | None = None, per_step: int = 0) -> None:
        self._path = path if per_step else None
        self._per_step = per_step
        self._writer: JsonlWriter | None = None

    @property
    def wanted(self) -> bool:
        """Whether any response is to be kept."""
        return self._path is not None

    def choose(self, step: int, count: int) -> list[int]:
        """Which of `count` responses of the step to keep, in order."""
        if self._path is None:
            return []
        return sorted(random.Random(step).sample(range(count), min(self._per_step, count)))

    def open(self) -> None:
        """Open the file now rather than with the first response."""
        if self._path is not None and self._writer is None:
            self._writer = JsonlWriter(self._path)

    def mark(self) -> FileMark | None:
        """What the file holds; None if it is not open."""
        return None if self._writer is None else self._writer.mark()

    def sync(self) -> None:
        """Flush the file to the disk itself; blocks."""
        if self._writer is not None:
            self._writer.sync()

    def write(self, record: SampleRecord) -> None:
        """Append one response."""
        self.open()
        if self._writer is not None:
            self._writer.write(vars(record))

    def close(self) -> None:
        """Close the file; a second call is a no-op."""
        if self._writer is not None:
            self._writer.close()

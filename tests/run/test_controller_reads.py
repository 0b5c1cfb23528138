"""Rows do not pass through the controller: what its process reads from the data plane, counted byte by byte."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.narrow import column_bytes
from penstock.rollout.recorded import Recording
from tests.run.conftest import ConfigMaker

CONTROLLER = "penstock.data_plane.narrow"
"""The controller's own client."""
NOT_READERS = ("penstock.data_plane.client", "penstock.data_plane.adapters")
PER_SAMPLE = 4 + 8 + 1 + 4
"""Reward, length, whether it was truncated, and its mask."""


class Reads:
    """Who reads which fields of how many bytes: the innermost caller outside the data plane's own interface."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[str, Counter[str]] = defaultdict(Counter)
        plain = MemoryDataPlane.get_samples

        def counted(plane: MemoryDataPlane, meta: Any, names: Any) -> Any:
            reader = _reader()
            batch = plain(plane, meta, names)
            for name, column in batch.columns.items():
                self.bytes[reader][name] += column_bytes(column)
            return batch

        async def counted_too(plane: MemoryDataPlane, meta: Any, names: Any) -> Any:
            return counted(plane, meta, names)  # in the caller's own stack, which says who it is

        monkeypatch.setattr(MemoryDataPlane, "get_samples", counted)
        monkeypatch.setattr(MemoryDataPlane, "get_samples_async", counted_too)


def _reader() -> str:
    frame = sys._getframe(1)
    while True:
        name = str(frame.f_globals["__name__"])
        if name.startswith("penstock.") and not name.startswith(NOT_READERS):
            return name
        assert frame.f_back is not None, "nobody of ours reads"
        frame = frame.f_back


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_controller_reads_one_number_per_sample_and_a_checkpoint_adds_nothing(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is on that once passed through it: recording, kept samples, checkpoints with ready groups."""
    reads = Reads(monkeypatch)
    config = make_config(
        **{
            "rollout.record": True,
            "observe.samples_per_step": 2,
            "checkpoint.every_steps": 1,
            "training.max_steps": 3,
            "staleness": {"policy": "windowed", "max_staleness": 2},
        }
    )
    result = penstock.train(config)
    steps = int(lines(result.run_dir / "metrics.jsonl")[-1]["step"])
    samples = steps * config.training.prompt_groups_per_step * config.rollout.group_size
    assert steps == 3
    assert reads.bytes.pop(CONTROLLER).total() == PER_SAMPLE * samples
    assert not [name for name in reads.bytes if name.startswith(("penstock.controller", "penstock.run"))]
    # Texts were read by a worker, and the recording by nobody: it was written when the rows were.
    assert reads.bytes["penstock.rollout.sample_texts"][fields.RESPONSE_TEXT] > 0
    assert not reads.bytes.keys() & {"penstock.rollout.recording_writer", "penstock.rollout.manager"}
    assert len(Recording.read(result.run_dir).groups) >= steps * config.training.prompt_groups_per_step
    assert len(lines(result.run_dir / "samples.jsonl")) == 2 * steps

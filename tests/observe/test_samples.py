"""Kept responses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from penstock.observe.samples import SampleLog, SampleRecord

RECORD = SampleRecord(3, "g", "p", "env", "prompt\n", "response é", 0.5, -1.0, 2, 7, False)


def test_a_record_is_a_line_with_its_names(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", per_step=1)
    log.write(RECORD)
    log.close()
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line) == vars(RECORD)


def test_the_choice_is_the_same_each_time_and_favours_no_place() -> None:
    log = SampleLog("unused", per_step=2)
    assert log.choose(5, 100) == log.choose(5, 100)
    assert len(set(log.choose(5, 100))) == 2
    assert log.choose(5, 1) == [0]
    counts = Counter(place for step in range(2_000) for place in log.choose(step, 8))
    assert min(counts.values()) > 0.8 * 500
    assert max(counts.values()) < 1.2 * 500


@pytest.mark.parametrize("per_step", [0, 2])
def test_a_log_without_a_place_keeps_nothing(per_step: int, tmp_path: Path) -> None:
    log = SampleLog(None if per_step else tmp_path / "samples.jsonl", per_step)
    assert log.choose(1, 10) == []
    log.write(RECORD)
    log.close()
    assert list(tmp_path.iterdir()) == []

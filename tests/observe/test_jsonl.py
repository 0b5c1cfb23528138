"""Lines that are complete and valid JSON whatever happens."""

from __future__ import annotations

import json
import threading
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RecordError
from penstock.observe.jsonl import JsonlWriter, mark_of, plain


def lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1, "train/loss": 0.5})
    assert lines(writer.path) == [{"step": 1, "train/loss": 0.5}]
    writer.close()


def test_folder_is_made(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "runs" / "a" / "metrics.jsonl") as writer:
        writer.write({"a": 1})
    assert lines(writer.path) == [{"a": 1}]


def test_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with JsonlWriter(tmp_path / "m.jsonl") as writer:
            writer.write({"step": step})
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2]


def test_line_torn_by_a_crash_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste' + "p" * 200_000)
    with JsonlWriter(path) as writer:
        writer.write({"step": 2})
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"a": float("nan"), "b": [float("inf")], "c": {"d": -float("inf")}, "e": np.float32("nan")})
    assert lines(writer.path) == [{"a": None, "b": [None], "c": {"d": None}, "e": None}]


def test_values_of_other_libraries_become_plain() -> None:
    class Kind(Enum):
        INFRA = "infra"

    assert plain({"a": np.float32(0.5), "b": np.array([1, 2]), "c": Path("x"), "d": Kind.INFRA, 5: (1, 2)}) == {
        "a": 0.5,
        "b": [1, 2],
        "c": "x",
        "d": "infra",
        "5": [1, 2],
    }


def test_close_twice_is_fine_and_writing_afterwards_is_not(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write({"a": 1})


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        barrier = threading.Barrier(4)

        def write(number: int) -> None:
            barrier.wait()
            for index in range(200):
                writer.write({"thread": number, "index": index, "text": "x" * 200})

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    written = lines(writer.path)
    for number in range(4):
        assert [line["index"] for line in written if line["thread"] == number] == list(range(200))


def test_a_writer_that_is_not_open_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    writer = JsonlWriter(path, opened=False)
    with pytest.raises(ValueError, match="is closed"):
        writer.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"ste'
    writer.open()
    writer.write({"step": 2})
    writer.close()
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_a_mark_is_that_of_the_file_whoever_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    marks = []
    for process in range(3):
        with JsonlWriter(path) as writer:
            for _ in range(1_000):
                writer.write({"process": process, "text": "é" * 50})
            marks.append(writer.mark())
        with path.open("ab") as torn:
            torn.write(b'{"torn')
    assert [mark_of(path, mark.size) for mark in marks] == marks
    assert len({mark.digest for mark in marks}) == 3
    assert mark_of(path, 2 * marks[2].size).size == path.stat().st_size
    assert mark_of(tmp_path / "none", 5).size == 0


def test_a_line_that_the_disk_refused_is_not_in_the_mark(tmp_path: Path) -> None:
    with JsonlWriter("/dev/full") as writer:
        before = writer.mark()
        with pytest.raises(RecordError, match="No space left"):
            writer.write({"a": 1})
        assert writer.mark() == before


def test_a_file_that_was_deleted_or_replaced_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonlWriter(path) as writer:
        assert writer.is_in_place()
        path.unlink()
        assert not writer.is_in_place()
        path.write_text("")
        assert not writer.is_in_place()


def test_a_file_that_was_emptied_is_noticed(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"a": 1})
        assert writer.is_in_place()
        writer.path.write_text("")
        assert not writer.is_in_place()


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.floats() | st.text()))
def test_any_flat_record_is_one_line_of_valid_json(record: dict[str, Any]) -> None:
    text = json.dumps(plain(record), allow_nan=False)
    assert "\n" not in text
    assert set(json.loads(text)) == set(record)

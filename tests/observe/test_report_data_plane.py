"""The report's table of what the data plane cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.report.build import write_report
from penstock.observe.report.numerals import byte_size
from tests.support.run_files import step_metrics, write_lines, write_run


def page_of(folder: Path, per_step: list[dict[str, Any]]) -> str:
    """The page of a run whose steps have these metrics too."""
    write_run(folder, len(per_step))
    lines = [step_metrics(step) | more for step, more in enumerate(per_step, 1)]
    write_lines(folder / "metrics.jsonl", lines)
    write_report(folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def rows_of(page: str) -> dict[str, list[str]]:
    section = page[page.index('<section id="data_plane"') :]
    rows = re.findall(r"<tr>(.*?)</tr>", section[: section.index("</section>")])[1:]
    cells = [re.sub(r"<[^>]*>", "|", row) for row in rows]
    parts = [[cell for cell in row.split("|") if cell] for row in cells]
    return {name: numbers for name, *numbers in parts}


def operation(name: str, count: int, size: int, time_s: float, p50: float, **more: float) -> dict[str, float]:
    found = {"count": count, "bytes": size, "time_s": time_s, "p50_ms": p50, "p95_ms": 2 * p50, "p99_ms": 4 * p50}
    return {f"data_plane/{name}/{key}": float(value) for key, value in (found | more).items()}


def test_operations_are_summed_over_the_steps_and_latencies_are_the_latest(tmp_path: Path) -> None:
    first = operation("put", 4, 1_500_000, 0.5, 9.0) | operation("get", 1, 10, 0.1, 1.0)
    second = operation("put", 6, 500_000, 0.25, 3.0, errors=2, timeouts=1)
    whole = {"data_plane/time_s": 0.6, "data_plane/outstanding_bytes": 10.0, "data_plane/peak_bytes": 4e6}
    page = page_of(tmp_path, [first | whole, second | whole])
    assert rows_of(page) == {
        "put": ["10", "2 MB", "750 ms", "3 ms", "6 ms", "12 ms", "2", "1"],
        "get": ["1", "10 B", "100 ms", "1 ms", "2 ms", "4 ms", "0", "0"],
    }
    assert "operations take 600 ms in all" in page
    assert "Rows took up to 4 MB at a time." in page
    assert "<strong>Time in the data plane</strong>" in page


def test_a_run_that_did_not_observe_it_has_no_such_part(tmp_path: Path) -> None:
    assert 'id="data_plane"' not in page_of(tmp_path, [{}, {}])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (265_400, "265 kB"), (1.25e9, "1.25 GB"), (3e12, "3 TB"), (None, "–")],
)
def test_numbers_of_bytes_are_short(value: float | None, text: str) -> None:
    assert byte_size(value) == text

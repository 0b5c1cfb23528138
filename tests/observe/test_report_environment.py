"""What environments measure, in the report: a small chart for what changes, a line of text for what does not."""

from __future__ import annotations

from pathlib import Path

from penstock.observe.report.build import write_report
from tests.observe.test_report_drawing import check_html
from tests.support.run_files import step_metrics, write_lines, write_run


def page_of(folder: Path, **measured: list[float]) -> str:
    write_run(folder, steps=4)
    names = {name.replace("__", "/"): values for name, values in measured.items()}
    more = [{f"rollout/{name}": values[step] for name, values in names.items()} for step in range(4)]
    write_lines(folder / "metrics.jsonl", [step_metrics(step + 1) | more[step] for step in range(4)])
    page = write_report(folder).path.read_text(encoding="utf-8")
    check_html(page)
    return page


def section_of(page: str) -> str:
    return page.partition('<section id="environment"')[2].partition("</section>")[0]


def test_numbers_that_change_have_a_chart_and_others_a_line(tmp_path: Path) -> None:
    measured = {"environment-0__turns": [1.0, 2.0, 1.5, 2.5], "environment-0__tool_calls": [3.0] * 4}
    page = page_of(tmp_path / "run", **measured)
    found = section_of(page)
    assert "What the environment measures" in found
    assert "environment-0/turns" in found
    assert found.count("<figure") == 1
    assert "The same in all steps: environment-0/tool_calls: 3." in found
    assert "rollout/environment-0/turns" not in page.partition("All other metrics")[2], "it is shown once"


def test_a_run_whose_environment_measures_nothing_has_no_such_section(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", elsewhere__turns=[1.0, 2.0, 3.0, 4.0])
    assert section_of(page) == ""
    assert "rollout/elsewhere/turns" in page.partition("All other metrics")[2]

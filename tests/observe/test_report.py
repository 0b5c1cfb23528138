"""The report of a run: what it says, from files that are whole, cut off or missing, and that nothing in them is run."""

from __future__ import annotations

import fcntl
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, SetupError
from penstock.observe.report.build import write_report
from penstock.observe.report.data import RunStatus, load_run
from penstock.observe.report.sections_samples import MOST_RESPONSE, pick_samples
from penstock.observe.report.trace_data import read_trace
from tests.observe.test_report_drawing import check_html
from tests.support.run_files import HOSTILE, sample, write_lines, write_run, write_trace

SECTIONS = ("reward", "time", "staleness", "optimisation", "throughput", "samples", "failures", "settings")


def page_of(folder: Path) -> str:
    return write_report(folder).path.read_text(encoding="utf-8")


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


def elements(page: str) -> dict[str, set[str]]:
    """The elements of a page, each with the names of all attributes it ever has."""
    found: dict[str, set[str]] = {}

    class Seen(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.setdefault(tag, set()).update(name for name, _ in attrs)

    Seen().feed(page)
    return found


class TestThePage:
    def test_a_whole_run_has_every_section_and_its_figures(self, tmp_path: Path) -> None:
        written = write_report(write_run(tmp_path / "my-run", failures=True))
        page = written.path.read_text(encoding="utf-8")
        check_html(page)
        assert tuple(sections(page)) == SECTIONS
        assert written.path == tmp_path / "my-run" / "report.html"
        assert written.notes == ()
        assert written.figures["steps"] == 30
        assert written.figures["eval_start"] == 0.1
        assert written.figures["eval_end"] == 0.8
        assert written.figures["failures"] == 11
        assert written.figures["lag_max"] == 2
        assert "<h1>my-run" in page
        assert "reached max_steps" in page
        assert "EnvironmentFailure: the reward of prompt" in page
        assert "max_staleness: 2" in page

    def test_it_needs_nothing_from_outside(self, tmp_path: Path) -> None:
        page = page_of(write_run(tmp_path / "run"))
        assert not re.search(r"(?:src|href)=", page)
        assert not re.search(r"@import|url\(", page)
        assert "default-src &#x27;none&#x27;" in page

    def test_text_of_the_run_is_never_markup(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / HOSTILE.replace("/", ""), failures=True)
        hostile = sample(1) | {"prompt": HOSTILE, "response": HOSTILE, "environment": HOSTILE, "prompt_id": HOSTILE}
        write_lines(folder / "samples.jsonl", [hostile, sample(2)])
        (folder / "config.yaml").write_text(f"model: {{path: {json.dumps(HOSTILE)}}}\n")
        summary = {"stopped_by": HOSTILE, "error": HOSTILE}
        (folder / "summary.json").write_text(json.dumps(summary))
        write_lines(folder / "events.jsonl", [{"time": HOSTILE, "event": HOSTILE, "cause": HOSTILE}])
        metrics = (folder / "metrics.jsonl").read_text().replace("train/entropy", f"train/{json.dumps(HOSTILE)[1:-1]}")
        (folder / "metrics.jsonl").write_text(metrics)
        page = page_of(folder)
        check_html(page)
        assert "<img" not in page
        assert page.count("<script") == page.count("</script>")
        assert {"html", "svg", "script"} < (found := elements(page)).keys()
        assert found.keys() & {"img", "iframe", "object", "link", "a"} == set()
        assert [name for names in found.values() for name in names if name.startswith("on")] == []
        assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 5

    def test_white_space_of_responses_is_kept_and_long_ones_are_cut_with_a_mark(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        long = "a" * MOST_RESPONSE + "b" * 500
        write_lines(folder / "samples.jsonl", [sample(1) | {"response": "  x\n\n\ty"}, sample(2) | {"response": long}])
        page = page_of(folder)
        assert "<pre>  x\n\n\ty</pre>" in page
        assert "500 more characters are in samples.jsonl" in page
        assert "bbbb" not in page

    def test_environments_have_a_chart_of_their_own_when_there_are_several(self, tmp_path: Path) -> None:
        assert "Reward by environment" in page_of(write_run(tmp_path / "two", environments=2))
        assert "Reward by environment" not in page_of(write_run(tmp_path / "one", environments=1))

    def test_a_long_run_gives_a_small_page_in_little_time(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run", steps=3_000, failures=True)
        started = time.process_time()
        written = write_report(folder)
        assert time.process_time() - started < 5
        assert written.size < 3 * 2**20

    def test_the_same_run_gives_the_same_page(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        assert page_of(folder) == page_of(folder)


class TestFilesAsTheyAre:
    @pytest.mark.parametrize("missing", ["config.yaml", "events.jsonl", "samples.jsonl", "trace.json"])
    def test_a_missing_file_costs_its_section_only(self, missing: str, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / missing).unlink()
        page = page_of(folder)
        check_html(page)
        assert "reward" in sections(page)
        if missing != "samples.jsonl":
            assert f"{missing} is missing" in page

    def test_metrics_alone_are_enough(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "train/reward_mean": 0.5}])
        page = page_of(tmp_path)
        check_html(page)
        assert sections(page) == ["reward", "settings"]

    def test_an_evaluation_alone_is_enough(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "eval/reward_mean": 0.5}])
        assert write_report(tmp_path).figures["eval_end"] == 0.5

    def test_a_killed_run_is_told_as_such(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / "summary.json").unlink()
        for name in ("metrics.jsonl", "events.jsonl", "samples.jsonl", "trace.json"):
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(content[: len(content) - 25])
        written = write_report(folder)
        assert written.figures["status"] == "cut off"
        assert len(written.notes) == 4
        page = written.path.read_text(encoding="utf-8")
        assert "cut off before its end" in page
        assert "metrics.jsonl: 1 line is cut off and left out" in page
        assert tuple(sections(page)) == SECTIONS

    def test_a_run_that_holds_its_lock_is_still_running(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / "summary.json").unlink()
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert load_run(folder).status is RunStatus.RUNNING
        assert load_run(folder).status is RunStatus.CUT_OFF

    def test_a_failed_run_shows_its_error(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / "summary.json").write_text(json.dumps({"stopped_by": "error", "error": "EngineError: gone"}))
        page = page_of(folder)
        assert '<span class="status failed">failed</span>' in page
        assert "EngineError: gone" in page

    def test_values_that_are_no_numbers_are_left_out(self, tmp_path: Path) -> None:
        lines: list[dict[str, Any]] = [
            {
                "step": k,
                "train/reward_mean": None if k == 2 else 0.5,
                "train/loss": "bad",
                "timing/step_s": float("nan"),
            }
            for k in range(1, 5)
        ]
        write_lines(tmp_path / "metrics.jsonl", lines)
        data = load_run(tmp_path)
        assert data.points("train/reward_mean") == [(1.0, 0.5), (3.0, 0.5), (4.0, 0.5)]
        assert data.points("train/loss") == []
        check_html(page_of(tmp_path))

    def test_a_folder_that_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is not the folder of a run"):
            write_report(tmp_path)
        with pytest.raises(ConfigError, match="is not a folder"):
            write_report(tmp_path / "nothing")

    def test_a_run_without_metrics_yet(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("{}")
        (tmp_path / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match="has no metrics yet"):
            write_report(tmp_path)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        with pytest.raises(SetupError, match="cannot be written"):
            write_report(folder, tmp_path / "no" / "such" / "folder.html")


class TestTimeline:
    def test_few_steps_are_one_window(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "trace.json", 3)
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        (window,) = trace.windows
        assert window.label == "all steps"
        assert [span.name for span in window.steps] == ["step 0", "step 1", "step 2"]
        assert len(window.groups) == 12
        assert window.groups[0].facts["end"] == "trained"
        assert sum(span.end - span.begin for span in window.trainer) == pytest.approx(3 * 0.3)
        assert sum(span.end - span.begin for span in window.waits) == pytest.approx(3 * 0.15)
        assert window.engine[:2] == [(0.0, 90.0), (pytest.approx(0.15), 0.0)]

    def test_many_steps_have_windows_at_the_beginning_the_middle_and_the_end(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "trace.json", 60)
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        assert [(w.label, w.steps[0].name, w.steps[-1].name) for w in trace.windows] == [
            ("first steps", "step 0", "step 7"),
            ("middle", "step 26", "step 33"),
            ("last steps", "step 52", "step 59"),
        ]

    def test_a_large_trace_is_read_in_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.observe.report.trace_data._PIECE_BYTES", 40_000)
        write_trace(tmp_path / "trace.json", 200)
        assert (tmp_path / "trace.json").stat().st_size > 5 * 40_000
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        assert trace.notes == []
        first, middle, last = trace.windows
        assert first.steps[0].name == "step 0"
        assert 80 < int(middle.steps[0].args["step"]) < 120
        assert last.steps[-1].name == "step 199"
        assert all(window.trainer and window.pauses for window in trace.windows)

    def test_steps_with_very_many_groups_make_a_window_shorter(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "trace.json", 10, groups_per_step=150)
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        assert all(len(window.groups) <= 320 for window in trace.windows)
        assert len(trace.windows[0].steps) == 2

    def test_a_trace_without_a_finished_step_gives_no_timeline(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        write_trace(folder / "trace.json", 0)
        written = write_report(folder)
        assert written.notes == ("trace.json has no finished step, so there is no timeline",)


class TestPickedSamples:
    def test_few_are_all_shown_newest_first(self) -> None:
        assert [s["step"] for s in pick_samples([sample(k) for k in range(1, 6)])] == [5, 4, 3, 2, 1]

    def test_of_many_the_best_and_the_worst_and_both_ends_are_there(self) -> None:
        many = [sample(k) | {"reward": ((k * 7919) % 5000) / 5000} for k in range(5000)]
        picked = pick_samples(many)
        rewards = [s["reward"] for s in picked]
        assert len(picked) <= 240
        assert (min(rewards), max(rewards)) == (0.0, 4999 / 5000)
        assert (picked[0]["step"], picked[-1]["step"]) == (4999, 0)

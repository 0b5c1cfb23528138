"""The report's timeline, read from traces of any size and state."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.observe.group_lives import GroupEnd
from penstock.observe.report.build import write_report
from penstock.observe.report.data import load_run
from penstock.observe.report.trace_data import read_trace
from penstock.observe.timeline import Timeline
from penstock.observe.trace import TraceFile
from tests.observe.test_report import page_of
from tests.support.run_files import StepClock, write_run, write_trace


class TestTimeline:
    def test_few_steps_are_one_window(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "trace.json", 3)
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        (window,) = trace.windows
        assert window.label == "all steps"
        assert [span.name for span in window.steps] == ["step 1", "step 2", "step 3"]
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
            ("first steps", "step 1", "step 8"),
            ("middle", "step 27", "step 34"),
            ("last steps", "step 53", "step 60"),
        ]

    @pytest.mark.parametrize("chunk", [1_000, 2**24])
    def test_a_large_trace_is_parsed_only_where_it_is_shown(
        self, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.observe.report.trace_index._CHUNK_BYTES", chunk)
        write_trace(tmp_path / "trace.json", 200)
        content = (tmp_path / "trace.json").read_bytes()
        place = content.index(b"group00000300")  # of step 76, which no window shows
        (tmp_path / "trace.json").write_bytes(content[: place - 9] + b"garbage" + content[place:])
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        assert trace.notes == []
        first, middle, last = trace.windows
        assert first.steps[0].name == "step 1"
        assert [span.args["step"] for span in middle.steps] == list(range(97, 105))
        assert last.steps[-1].name == "step 200"
        assert all(window.trainer and window.pauses and len(window.groups) == 32 for window in trace.windows)

    @pytest.mark.parametrize("groups", [1_024, 2_048])
    def test_steps_with_more_groups_than_can_be_drawn_keep_their_timeline_and_say_so(
        self, groups: int, tmp_path: Path
    ) -> None:
        folder = write_run(tmp_path / "run")
        write_trace(folder / "trace.json", 4, groups_per_step=groups)
        page = page_of(folder)
        assert len(load_run(folder).notes) == 0
        assert page.count('class="track-panel"') == 3
        assert page.count(f"96 of {groups:,} groups are drawn") == 3

    def test_groups_that_began_before_a_window_are_in_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.observe.report.trace_data._STEPS_BEFORE", 0)
        clock = StepClock()
        timeline = Timeline(TraceFile(tmp_path / "trace.json"), clock)
        pump = timeline.track("controller", "train pump")
        timeline.groups.dispatched("early")
        timeline.groups.committed("early")
        for step in range(1, 21):
            clock.now = float(step)
            with pump.span(f"step {step}", step=step):
                if step == 20:
                    timeline.groups.selected("early", step=step, lag=3)
                clock.now += 0.5
        timeline.groups.ended("early", GroupEnd.TRAINED)
        timeline.close()
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        (life,) = trace.windows[-1].groups
        assert (life.dispatched, life.committed, life.selected) == (-math.inf, -math.inf, 20.0)

    def test_a_full_trace_does_not_pass_for_the_whole_run(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "trace.json", 30, limit_bytes=50_000)
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        assert trace.notes == ["trace.json is full: it ends before the run does"]
        assert trace.windows[-1].label == "last steps in the trace"

    def test_damage_in_the_middle_is_not_called_an_early_end(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "trace.json", 3)
        lines = (tmp_path / "trace.json").read_bytes().splitlines(keepends=True)
        middle = next(k for k, line in enumerate(lines) if b"train_microbatch" in line)
        lines[middle] = lines[middle][:20] + b"\n"
        (tmp_path / "trace.json").write_bytes(b"".join(lines))
        trace = read_trace(tmp_path / "trace.json")
        assert trace is not None
        assert trace.notes == ["trace.json: 1 event could not be read"]

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

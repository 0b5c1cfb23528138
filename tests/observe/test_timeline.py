"""The timeline: what is recorded is a valid trace, whatever happens and however the run ends."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.group_lives import GroupEnd
from penstock.observe.timeline import SHORTEST_SECONDS, Timeline
from penstock.observe.trace import FULL, TraceFile
from tests.support.run_files import StepClock
from tests.support.trace_checks import KeptTrace, check_trace, ends_of, lives


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
def kept() -> KeptTrace:
    return KeptTrace()


@pytest.fixture
def timeline(kept: KeptTrace, clock: StepClock) -> Timeline:
    return Timeline(kept, clock)


class TestTrack:
    def test_switch_writes_what_went_on_before(self, timeline: Timeline, kept: KeptTrace, clock: StepClock) -> None:
        track = timeline.track("controller", "pump")
        track.switch("waiting", wanted=3)
        clock.now = 2.0
        track.switch("working")
        clock.now = 5.0
        track.switch(None)
        assert kept.spans() == [("waiting", 0.0, 2e6), ("working", 2e6, 3e6)]

    def test_what_takes_no_time_is_left_out(self, timeline: Timeline, kept: KeptTrace, clock: StepClock) -> None:
        track = timeline.track("controller", "pump")
        track.switch("a blink")
        clock.now = SHORTEST_SECONDS / 2
        track.switch(None)
        assert kept.spans() == []

    def test_span_ends_when_its_block_raises(self, timeline: Timeline, kept: KeptTrace) -> None:
        track = timeline.track("controller", "run")
        with pytest.raises(ZeroDivisionError), track.span("evaluation", when="start"):
            raise ZeroDivisionError
        assert [(e["ph"], e["name"]) for e in kept.events if e["ph"] in "BE"] == [
            ("B", "evaluation"),
            ("E", "evaluation"),
        ]

    def test_recorded_spans_never_overlap(self, timeline: Timeline, kept: KeptTrace) -> None:
        track = timeline.track("trainer", "trainer")
        track.add("first", 1.0, 3.0)
        track.add("second", 2.5, 4.0)
        assert kept.spans() == [("first", 1e6, 2e6), ("second", 3e6, 1e6)]

    def test_a_track_is_named_once_and_shared(self, timeline: Timeline, kept: KeptTrace) -> None:
        assert timeline.track("engines", "a") is timeline.track("engines", "a")
        named = [e["args"]["name"] for e in kept.events if e["name"] == "thread_name"]
        assert named == ["a"]

    @given(
        st.lists(st.tuples(st.sampled_from(["begin", "end", "switch", "stop", "tick"]), st.floats(0, 1)), max_size=60)
    )
    def test_any_order_of_calls_gives_a_valid_trace(self, calls: list[tuple[str, float]]) -> None:
        kept, clock = KeptTrace(), StepClock()
        timeline = Timeline(kept, clock)
        track = timeline.track("controller", "pump")
        for call, seconds in calls:
            if call == "begin":
                track.begin("part")
            elif call == "end":
                track.end()
            elif call == "switch":
                track.switch("doing")
            elif call == "stop":
                track.switch(None)
            else:
                clock.now += seconds
        timeline.close()
        check_trace(kept.events)


class TestCounters:
    def test_only_changes_are_written(self, timeline: Timeline, kept: KeptTrace, clock: StepClock) -> None:
        for ready in (1, 1, 2):
            clock.now += 1
            timeline.count("controller", "buffer", ready=ready)
        assert [(e["ts"], e["args"]) for e in kept.events if e["ph"] == "C"] == [
            (1e6, {"ready": 1}),
            (3e6, {"ready": 2}),
        ]

    def test_events_become_marks_with_long_texts_cut(self, timeline: Timeline, kept: KeptTrace) -> None:
        timeline.on_event("prompt_dropped", {"reason": "x" * 10_000, "name": "a", "epoch": 2})
        (mark,) = [e for e in kept.events if e["ph"] == "i"]
        assert mark["name"] == "prompt_dropped"
        assert len(mark["args"]["reason"]) < 1000
        assert mark["args"]["name"] == "a"


class TestGroups:
    def test_the_life_of_a_trained_group(self, timeline: Timeline, kept: KeptTrace, clock: StepClock) -> None:
        groups = timeline.groups
        groups.dispatched("g", prompt_id="p", start_version=2)
        clock.now = 1.0
        groups.committed("g")
        clock.now = 2.0
        groups.selected("g", step=3, lag=1)
        groups.note("g", reward_mean=0.5)
        clock.now = 3.0
        groups.ended("g", GroupEnd.TRAINED)
        timeline.close()
        check_trace(kept.events)
        (life,) = lives(kept.events).values()
        assert [(e["ph"], e["name"], e["ts"]) for e in life] == [
            ("b", "group", 0.0),
            ("b", "generating", 0.0),
            ("e", "generating", 1e6),
            ("b", "ready", 1e6),
            ("e", "ready", 2e6),
            ("b", "training", 2e6),
            ("e", "training", 3e6),
            ("e", "group", 3e6),
        ]
        assert life[0]["args"] == {"group_id": "g", "prompt_id": "p", "start_version": 2}
        assert life[-1]["args"] == {"end": "trained", "step": 3, "lag": 1, "reward_mean": 0.5}

    def test_the_first_end_counts(self, timeline: Timeline, kept: KeptTrace) -> None:
        timeline.groups.dispatched("g")
        timeline.groups.ended("g", GroupEnd.DROPPED)
        timeline.groups.ended("g", GroupEnd.TRAINED)
        timeline.groups.committed("g")
        assert ends_of(kept.events) == ["dropped"]

    def test_groups_alive_at_the_end_of_the_run_end_with_it(self, timeline: Timeline, kept: KeptTrace) -> None:
        timeline.groups.dispatched("a")
        timeline.groups.dispatched("b")
        timeline.groups.committed("b")
        timeline.close()
        check_trace(kept.events)
        assert ends_of(kept.events) == ["run ended", "run ended"]


class TestFile:
    def test_closed_file_is_json(self, tmp_path: Path) -> None:
        timeline = Timeline.to_file(tmp_path / "trace.json")
        timeline.track("controller", "pump").begin('a "quoted" name\n', value=float("nan"), path=tmp_path)
        timeline.close()
        timeline.close()
        events = json.loads((tmp_path / "trace.json").read_text())
        check_trace(events)
        (begin,) = [e for e in events if e["ph"] == "B"]
        assert begin["name"] == 'a "quoted" name\n'
        assert begin["args"] == {"value": None, "path": str(tmp_path)}

    def test_nothing_recorded_is_json_too(self, tmp_path: Path) -> None:
        TraceFile(tmp_path / "trace.json").close()
        assert json.loads((tmp_path / "trace.json").read_text()) == []

    def test_recording_after_the_end_is_ignored(self, tmp_path: Path) -> None:
        timeline = Timeline.to_file(tmp_path / "trace.json")
        timeline.close()
        timeline.track("controller", "pump").mark("late")
        assert "late" not in (tmp_path / "trace.json").read_text()

    def test_threads_may_record_at_the_same_time(self, tmp_path: Path) -> None:
        timeline = Timeline.to_file(tmp_path / "trace.json")

        def work(name: str) -> None:
            for k in range(200):
                timeline.track("engines", name).mark("tick", k=k)
                timeline.count("engines", name, k=k)

        threads = [threading.Thread(target=work, args=(f"engine {k}",)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        timeline.close()
        events = json.loads((tmp_path / "trace.json").read_text())
        check_trace(events)
        assert sum(e["ph"] == "i" for e in events) == 800

    def test_a_full_trace_says_so_and_is_json(self, tmp_path: Path) -> None:
        sink = TraceFile(tmp_path / "trace.json", limit_bytes=5_000)
        timeline = Timeline(sink)
        track = timeline.track("controller", "pump")
        for k in range(500):
            track.mark("tick", k=k)
        timeline.close()
        events = json.loads((tmp_path / "trace.json").read_text())
        assert events[-1]["name"] == FULL
        assert (tmp_path / "trace.json").stat().st_size < 6_000

    def test_a_disk_that_refuses_ends_the_trace_and_nothing_else(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            timeline = Timeline.to_file("/dev/full")
            timeline.track("controller", "pump").mark("tick")
            timeline.close()
        assert "the trace ends here" in caplog.text

    def test_whatever_goes_wrong_in_its_thread_ends_the_trace_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def explode(*event: object) -> bytes:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

        monkeypatch.setattr("penstock.observe.trace._encoded", explode)
        with caplog.at_level(logging.WARNING):
            sink = TraceFile(tmp_path / "trace.json")
            sink.write("i", "tick", 0.0, 1, 1, {})
            sink._thread.join(10)
        assert "the trace ends here" in caplog.text
        sink.write("i", "tick", 0.0, 1, 1, {})
        assert sink._inbox.empty()

    def test_a_disk_that_hangs_ends_the_trace_before_memory_is_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        go_on = threading.Event()

        def slow(*event: object) -> bytes:
            go_on.wait()
            return b"{}"

        monkeypatch.setattr("penstock.observe.trace._encoded", slow)
        monkeypatch.setattr("penstock.observe.trace.MOST_WAITING", 100)
        sink = TraceFile(tmp_path / "trace.json")
        for _ in range(1_000):
            sink.write("i", "tick", 0.0, 1, 1, {})
        assert sink._inbox.qsize() <= 101
        assert "the disk cannot keep up" in caplog.text
        go_on.set()
        sink.close()
        assert json.loads((tmp_path / "trace.json").read_text())

    def test_a_killed_process_leaves_all_but_its_last_moment(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        code = f"""
import os, sys, time
from penstock.observe.timeline import Timeline
timeline = Timeline.to_file({str(path)!r})
timeline.track("controller", "train pump").begin("step 7")
timeline.groups.dispatched("g")
print(flush=True)
time.sleep(60)
"""
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 10
        while b"generating" not in path.read_bytes() and time.monotonic() < deadline:
            os.sched_yield()
        process.kill()
        process.wait()
        process.stdout.close()
        events = json.loads(path.read_text() + "]")
        assert [e["name"] for e in events if e["ph"] in "Bb"] == ["step 7", "group", "generating"]


def test_recording_is_cheap(tmp_path: Path) -> None:
    """A group costs about 0.06 ms of processor time, file included; the bound leaves room for a slow machine."""
    timeline = Timeline.to_file(tmp_path / "trace.json")
    groups = 2_000
    started = time.process_time()
    for k in range(groups):
        group = f"group{k:08d}"
        timeline.groups.dispatched(group, prompt_id=str(k), epoch=0, start_version=3, target_step=4)
        timeline.groups.committed(group, end_version=4)
        timeline.groups.selected(group, step=3, lag=1)
        timeline.groups.ended(group, GroupEnd.TRAINED)
        timeline.count("controller", "buffer", ready=k)
    timeline.close()
    assert (time.process_time() - started) / groups < 1e-3
    assert (tmp_path / "trace.json").stat().st_size / groups < 1_500


def test_a_timeline_that_is_off_keeps_nothing_and_fails_nothing() -> None:
    timeline = Timeline.off()
    with timeline.track("controller", "pump").span("step"):
        timeline.groups.dispatched("g")
        timeline.count("controller", "buffer", ready=1)
    timeline.close()

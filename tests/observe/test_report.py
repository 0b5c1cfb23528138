"""The report of a run: what it says, from files that are whole, cut off or missing, and that nothing in them is run."""

from __future__ import annotations

import fcntl
import itertools
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.observe.report.build import write_report
from penstock.observe.report.data import RunStatus, load_run
from penstock.observe.report.event_data import EventTally
from penstock.observe.report.sample_data import choose_samples
from penstock.observe.report.sections_samples import MOST_RESPONSE
from tests.observe.test_report_drawing import check_html
from tests.support.run_files import (
    HOSTILE,
    events,
    sample,
    step_metrics,
    write_lines,
    write_run,
)

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
        assert written.figures["eval/reward_mean_start"] == 0.1
        assert written.figures["eval/reward_mean"] == 0.8
        assert written.figures["failures"] == 11
        assert written.figures["staleness/lag_max"] == 2
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

    def test_checkpoints_are_a_part_of_a_step_on_top_of_its_time(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run", steps=2)
        lines = [step_metrics(step) | {"timing/exposed_s": 0.1} for step in (1, 2)]
        write_lines(folder / "metrics.jsonl", [lines[0], lines[1] | {"timing/checkpoint_s": 0.5}])
        page = page_of(folder)
        assert "checkpoint 33 %" in page
        assert "training 45 %" in page

    def test_the_line_of_overlap_lies_under_that_of_the_busier_side(self, tmp_path: Path) -> None:
        page = page_of(write_run(tmp_path / "run"))
        chart = page[page.index("Busy time") :]
        wide, *strong = re.findall(r'class="line (\w+) (c\d)"', chart)[:3]
        assert (wide, strong) == (("wide", "c3"), [("strong", "c1"), ("strong", "c2")])

    @pytest.mark.parametrize(
        ("evals", "words"),
        [([], "no evaluation"), ([0.1], "one evaluation"), ([0.1, 0.2], "first and last evaluation")],
    )
    def test_the_tile_says_how_many_evaluations_it_is_about(
        self, evals: list[float], words: str, tmp_path: Path
    ) -> None:
        lines = [step_metrics(1), *({"step": k, "eval/reward_mean": value} for k, value in enumerate(evals))]
        write_lines(tmp_path / "metrics.jsonl", lines)
        assert f">{words}<" in page_of(tmp_path)

    def test_the_page_does_not_say_where_on_the_disk_the_run_is(self, tmp_path: Path) -> None:
        assert str(tmp_path) not in page_of(write_run(tmp_path / "run"))

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
        assert write_report(tmp_path).figures["eval/reward_mean"] == 0.5

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
        assert "ended unexpectedly" in page
        assert "metrics.jsonl: the last line is cut off and left out" in page
        assert tuple(sections(page)) == SECTIONS

    def test_a_run_that_holds_its_lock_is_still_running(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / "summary.json").unlink()
        write_lines(folder / "events.jsonl", list(events(30, failures=False))[:-1])
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
        with pytest.raises(ConfigError, match="has no metrics and no events yet"):
            write_report(tmp_path)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        with pytest.raises(ConfigError, match="cannot be written"):
            write_report(folder, tmp_path / "no" / "such" / "folder.html")
        (tmp_path / "folder").mkdir()
        with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
            write_report(folder, tmp_path / "folder")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


class TestChosenSamples:
    @pytest.mark.parametrize("count", [0, 1, 5, 240])
    def test_few_are_all_shown_newest_first(self, count: int) -> None:
        choice = choose_samples(sample(k) for k in range(count))
        assert [s["step"] for s in choice.shown] == list(range(count - 1, -1, -1))
        assert choice.total == count

    @pytest.mark.parametrize("count", [241, 480, 481, 5000])
    def test_of_many_the_best_and_the_worst_and_both_ends_are_there(self, count: int) -> None:
        many = (sample(k) | {"reward": ((k * 7919) % count) / count} for k in range(count))
        choice = choose_samples(many)
        rewards = [s["reward"] for s in choice.shown]
        steps = [s["step"] for s in choice.shown]
        assert 150 <= len(choice.shown) <= 240
        assert choice.total == count
        assert (min(rewards), max(rewards)) == (0.0, (count - 1) / count)
        assert (steps[0], steps[-1]) == (count - 1, 0)
        assert max(a - b for a, b in itertools.pairwise(steps)) <= count / 60


class TestEvents:
    def test_missing_records_are_failures_and_data_that_ended_is_none(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        names = ["run_started", "partial_step_dropped", "run_ended"]
        write_lines(folder / "events.jsonl", [{"time": "2026-03-01T12:00:00Z", "event": name} for name in names])
        written = write_report(folder)
        assert written.figures["failures"] == 0
        assert "Nothing went wrong." in written.path.read_text(encoding="utf-8")
        names = ["run_started", "samples_not_kept", "logger_behind", "logger_gaps", "run_ended"]
        write_lines(folder / "events.jsonl", [{"time": "2026-03-01T12:00:00Z", "event": name} for name in names])
        written = write_report(folder)
        assert written.figures["failures"] == 3
        page = written.path.read_text(encoding="utf-8")
        assert "Nothing went wrong." not in page
        assert "responses of a step are missing from samples.jsonl" in page

    def test_very_many_causes_take_no_memory_and_the_newest_are_shown(self) -> None:
        tally = EventTally.of({"event": "prompt_dropped", "cause": f"cause {k}"} for k in range(10_000))
        kind = tally.kinds["prompt_dropped"]
        assert (kind.count, len(kind.causes), next(reversed(kind.causes))) == (10_000, 100, "cause 9999")
        assert kind.forgotten == 9_900


class TestDamagedFiles:
    def test_times_with_and_without_a_place_can_be_compared(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        times = ["2026-03-01T12:00:00+00:00", "2026-03-01T12:00:05", "0001-01-01T00:00:00+14:00", "yesterday", None]
        write_lines(folder / "events.jsonl", [{"time": time, "event": "stalled"} for time in times])
        assert "+5 s" in page_of(folder)

    @pytest.mark.parametrize(
        "line",
        [
            {"staleness/lag_histogram/none": 3.0},
            {"staleness/lag_histogram/0": None},
            {"staleness/lag_histogram/99999999999999999999": 1.0},
            {"train/loss": 10**401},
            {"train/loss": 1e308, "train/entropy": -1e308, "timing/step_s": 1e308},
            {"train/loss": 5e-324, "timing/elapsed_s": "soon"},
            {"train/loss": {"a": [1]}, "timing/step_s": [], "train/reward_mean": {}},
        ],
        ids=str,
    )
    def test_values_that_make_no_sense_are_left_out(self, line: dict[str, Any], tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run", steps=3)
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": 4, "train/reward_mean": 0.5} | line) + "\n")
        page = page_of(folder)
        check_html(page)
        assert not re.search(r"[^a-z]nan|infinity", page[page.index("<body") : page.index("<script>")].lower())

    def test_json_too_deep_to_be_read_is_a_line_that_is_left_out(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        with (folder / "events.jsonl").open("a") as log:
            log.write("[" * 100_000 + "\nno json\n")
        assert write_report(folder).notes == ("events.jsonl: 2 lines cannot be read and are left out",)

    def test_steps_out_of_order_are_put_in_order(self, tmp_path: Path) -> None:
        lines = [{"step": step, "train/reward_mean": step / 10} for step in (3, 1, 2, 2)]
        write_lines(tmp_path / "metrics.jsonl", lines)
        assert load_run(tmp_path).points("train/reward_mean") == [(1.0, 0.1), (2.0, 0.2), (3.0, 0.3)]
        assert write_report(tmp_path).figures["steps"] == 3

    def test_a_torn_summary_is_told_and_the_events_say_how_the_run_ended(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / "summary.json").write_text('{"stopped_by": "max_st')
        written = write_report(folder)
        assert (written.figures["status"], written.figures["stopped_by"]) == ("ended", "max_steps")
        assert written.notes == ("summary.json cannot be read; how the run ended is taken from its events",)

    def test_a_config_that_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run")
        (folder / "config.yaml").write_text("model: {path: [")
        assert write_report(folder).notes == ("config.yaml cannot be read, so settings are missing",)

    @settings(max_examples=60, deadline=None)
    @given(name=st.sampled_from(["metrics", "events", "samples", "trace", "summary"]), data=st.data())
    def test_whatever_is_in_the_files_there_is_a_page(
        self, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
    ) -> None:
        folder = write_run(tmp_path_factory.mktemp("run"), steps=3)
        (path,) = folder.glob(f"{name}.json*")
        lines = path.read_text().splitlines()
        for place in data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=4)):
            lines[place] = data.draw(_damaged(lines[place]))
        path.write_text("\n".join(lines))
        check_html(page_of(folder))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def _damaged(line: str) -> st.SearchStrategy[str]:
    """The line torn, or with another value somewhere."""
    try:
        record = json.loads(line.rstrip(","))
    except ValueError:
        record = None
    torn = st.integers(0, len(line)).map(lambda end: line[:end])
    if not isinstance(record, dict):
        return torn
    changed = st.tuples(st.sampled_from(sorted(record)), VALUES).map(
        lambda item: json.dumps({**record, item[0]: item[1]})
    )
    return torn | changed

"""The views, drawn on consoles that record."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.observe.console import PlainView, ProgressView, SilentView, TableView, make_console

FULL = {
    "eval/reward_mean": 0.5,
    "eval/step": 2,
    "rollout/response_length_mean": 123.4,
    "rollout/truncation_rate": 0.125,
    "train/entropy": 0.52,
    "train/kl_reference": 0.00123,
}
"""On top of `STEP`: what only some runs have."""
STEP = {
    "step": 3,
    "train/reward_mean": 0.42,
    "staleness/lag_mean": 0.5,
    "staleness/lag_max": 1,
    "throughput/generated_tokens_s": 3400.0,
    "timing/step_s": 2.0,
    "buffer/ready": 5,
}


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console(width: int = 80, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, record=True, color_system=None)


def written(recorder: Console) -> str:
    assert isinstance(recorder.file, io.StringIO)
    return recorder.file.getvalue()


def drawn(view: TableView, width: int = 80) -> str:
    """What the table looks like now, as text."""
    recorder = console(width)
    recorder.print(view.render(width))
    return recorder.export_text()


@pytest.mark.parametrize(
    ("mode", "terminal", "expected"),
    [
        ("auto", False, PlainView),
        ("auto", True, TableView),
        ("plain", True, PlainView),
        ("table", False, TableView),
        ("off", True, SilentView),
    ],
)
def test_mode_decides_the_view(mode: str, terminal: bool, expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    view = make_console(mode, 10, console(terminal=terminal))  # type: ignore[arg-type]
    assert type(view) is expected
    view.close()


def test_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_console("auto", 10, console(terminal=True))) is PlainView


class TestPlain:
    def test_a_line_a_step_however_narrow(self) -> None:
        recorder = console(width=20)
        view = make_console("plain", 13, recorder)
        view.on_step(STEP)
        assert written(recorder) == "step 3/13  reward 0.42  lag 0.5/1  3,400 tok/s  2.00 s/step  ETA 20s\n"

    def test_time_left_without_measured_steps_comes_from_the_clock(self) -> None:
        recorder, clock = console(), FakeClock()
        view = PlainView(recorder, 5, clock)
        clock.now = 4.0
        view.on_step({"step": 1})
        assert written(recorder) == "step 1/5  ETA 16s\n"

    def test_important_events_and_notes(self) -> None:
        recorder = console()
        view = PlainView(recorder, None)
        view.on_event("weights_published", {"version": 1})
        view.on_event("prompt_dropped", {"prompt_id": "[b]p1"})
        view.note("saved [1]")
        assert written(recorder) == "  ! prompt_dropped  prompt_id=[b]p1\nsaved [1]\n"

    def test_silent_after_close(self) -> None:
        recorder = console()
        view = PlainView(recorder, None)
        view.close()
        view.close()
        view.on_step(STEP)
        assert written(recorder) == ""


class TestTable:
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def recorder(self) -> Console:
        return console(terminal=True)

    @pytest.fixture
    def view(self, recorder: Console, clock: FakeClock) -> TableView:
        view = TableView(recorder, 13, clock)
        view.close()  # drawn by hand from here on
        return view

    def test_before_the_first_step(self, view: TableView) -> None:
        assert drawn(view).split()[:3] == ["step", "0/13", "0s"]

    def test_headline_and_row(self, view: TableView, clock: FakeClock) -> None:
        clock.now = 65.0
        view.on_step(STEP)
        head, names, row = drawn(view).splitlines()
        assert head.startswith("step 3/13  1m05s  ETA 20s")
        assert "━" in head
        assert names.split() == ["step", "reward", "lag", "tokens/s", "s/step", "ready"]
        assert row.split() == ["3", "0.42", "0.5/1", "3,400", "2.00", "5"]

    def test_all_figures_fit_a_usual_terminal_but_for_the_least(self, view: TableView) -> None:
        view.on_step({**STEP, **FULL})
        _, names, row = drawn(view, width=80).splitlines()
        assert names.split() == [
            "step", "reward", "eval", "length", "trunc", "entropy", "KL", "lag", "tokens/s", "s/step",
        ]  # fmt: skip
        assert row.split() == ["3", "0.42", "0.50@2", "123", "12%", "0.52", "0.0012", "0.5/1", "3,400", "2.00"]
        assert "ready" in drawn(view, width=90)

    @pytest.mark.parametrize("width", [8, 16, 24, 40, 60, 80])
    def test_every_width_keeps_whole_columns_in_their_order(self, view: TableView, width: int) -> None:
        view.on_step({**STEP, **FULL})
        wide = drawn(view, width=200).splitlines()[1].split()
        lines = drawn(view, width=width).splitlines()
        names = lines[1].split()
        assert max(map(len, lines)) <= width
        assert names == [name for name in wide if name in names]
        assert len(lines[2].split()) == len(names)

    def test_evaluation_has_a_column_once_there_is_one(self, view: TableView) -> None:
        view.on_step(STEP)
        assert "eval" not in drawn(view)
        view.on_step({**STEP, "eval/reward_mean": 0.77})
        assert "0.77" in drawn(view)

    def test_without_an_end_there_is_no_bar_and_no_time_left(self, recorder: Console) -> None:
        view = TableView(recorder, None)
        view.close()
        view.on_step(STEP)
        assert "━" not in drawn(view)
        assert "ETA" not in drawn(view)

    def test_only_the_last_steps_are_kept(self, view: TableView) -> None:
        for step in range(1, 30):
            view.on_step({"step": step})
        rows = [line.strip() for line in drawn(view).splitlines()[2:]]
        assert rows == [str(step) for step in range(22, 30)]

    def test_recent_important_events_are_below(self, view: TableView) -> None:
        for number in range(9):
            view.on_event("rollout_retried", {"group": f"[x]{number}"})
        view.on_event("weights_published", {"version": 3})
        events = [line for line in drawn(view).splitlines() if line.startswith("!")]
        assert [line.rstrip()[-1] for line in events] == ["5", "6", "7", "8"]
        assert "[x]5" in events[0]

    def test_narrow_terminal_keeps_to_its_width(self, view: TableView) -> None:
        view.on_step(STEP)
        view.on_event("rollout_retried", {"cause": "x" * 100})
        lines = drawn(view, width=30).splitlines()
        assert max(len(line) for line in lines) <= 30
        assert lines[0].startswith("step 3/13  0s  ETA 20s  ━")
        assert lines[1].split() == ["step", "reward", "lag", "tokens/s"]
        assert lines[2].split() == ["3", "0.42", "0.5/1", "3,400"]

    def test_live_display_ends_with_the_last_state_and_restores_the_cursor(self, recorder: Console) -> None:
        view = TableView(recorder, 13)
        view.note("[setting] up")
        view.on_step(STEP)
        view.close()
        view.close()
        text = written(recorder)
        assert "[setting] up" in text
        assert "0.42" in text
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_silent_view_does_nothing() -> None:
    view: ProgressView = SilentView()
    view.on_step(STEP)
    view.on_event("prompt_dropped", {})
    view.note("x")
    view.close()

"""Numbers, thinning, markup and charts of the report."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.observe.report.chart import SMALL, Line, Look, line_chart, shared_range
from penstock.observe.report.markup import Html, join, script_json, tag
from penstock.observe.report.numerals import alike, percent, seconds, short, step_axis, tick_labels, value_axis
from penstock.observe.report.stack import Band, Layer, binned, bins_of, stacked_bars, strip
from penstock.observe.report.thinning import Series, smoothed, thinned
from tests.support.run_files import HOSTILE

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


class TestNumbers:
    @given(st.lists(FINITE, min_size=1, max_size=20))
    def test_an_axis_holds_all_values_between_its_round_ends(self, values: list[float]) -> None:
        axis = value_axis(values)
        slack = 1e-6 * max(1e-12, *map(abs, values))
        assert axis.low - slack <= min(values)
        assert axis.high + slack >= max(values)
        assert axis.low == axis.ticks[0] < axis.ticks[-1] == axis.high
        assert 2 <= len(axis.ticks) <= 9

    @pytest.mark.parametrize(
        ("values", "ticks"),
        [
            ([0.0, 1.0], (0.0, 0.25, 0.5, 0.75, 1.0)),
            ([3.1, 7.9], (2.0, 4.0, 6.0, 8.0)),
            ([5.0], (2.0, 4.0, 6.0, 8.0)),
            ([], (0.0, 0.25, 0.5, 0.75, 1.0)),
        ],
    )
    def test_ticks_are_round(self, values: list[float], ticks: tuple[float, ...]) -> None:
        assert value_axis(values).ticks == ticks

    @given(st.integers(0, 10_000), st.integers(0, 10_000))
    def test_ticks_of_steps_are_whole_steps_inside_the_range(self, first: int, length: int) -> None:
        axis = step_axis(first, first + length)
        assert axis.ticks
        assert all(first <= tick <= first + length and float(tick).is_integer() for tick in axis.ticks)

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.0, "0"),
            (0.12345, "0.123"),
            (-1.5, "-1.5"),
            (1234.0, "1,234"),
            (12_345.0, "12.3k"),
            (4.56e6, "4.56M"),
            (5e-4, "5e-4"),
            (1.234e-12, "1.23e-12"),
            (None, "–"),
            (math.nan, "–"),
        ],
    )
    def test_short(self, value: float | None, text: str) -> None:
        assert short(value) == text

    def test_labels_of_an_axis_have_the_same_decimals(self) -> None:
        assert tick_labels([0.0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
        assert tick_labels([0.0, 2000.0, 10_000.0]) == ["0", "2,000", "10,000"]

    def test_percent_and_seconds(self) -> None:
        assert [percent(0.834), percent(0.014), percent(0.0), percent(None)] == ["83 %", "1.4 %", "0 %", "–"]
        assert [seconds(0.0123), seconds(2.5), seconds(125), seconds(7500)] == [
            "12.3 ms",
            "2.5 s",
            "2 min 05 s",
            "2 h 05 min",
        ]


class TestThinning:
    @given(st.lists(FINITE, max_size=300), st.integers(1, 50))
    def test_a_series_is_short_and_its_band_holds_every_value(self, values: list[float], most: int) -> None:
        series = thinned(enumerate(values), most)
        assert len(series) == min(len(values), most)
        if series.low:
            assert min(series.low) == min(values)
            assert max(series.high) == max(values)
            assert all(a <= b + 1e-6 * (1 + abs(b)) for a, b in zip(series.low, series.y, strict=True))
        assert list(series.x) == sorted(series.x)

    def test_what_is_no_number_is_left_out(self) -> None:
        assert thinned([(1, math.nan), (2, None), (3, 4.0)]) == Series((3.0,), (4.0,))

    def test_smoothed_is_the_mean_of_the_last_values(self) -> None:
        assert smoothed([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]

    @given(st.integers(1, 500))
    def test_bins_cover_every_step_once(self, count: int) -> None:
        bins = bins_of([float(step) for step in range(1, count + 1)])
        assert [place for member in bins.members for place in member] == list(range(count))
        assert len(bins.members) <= 96
        assert (bins.edges[0], bins.edges[-1]) == (0.5, count + 0.5)


class TestMarkup:
    def test_text_and_attributes_are_escaped(self) -> None:
        made = tag("p", HOSTILE, title=HOSTILE)
        assert "<img" not in made
        assert "</script>" not in made
        assert made.count("<") == 2

    def test_html_stays_as_it_is_but_not_inside_other_text(self) -> None:
        bold = tag("b", "x")
        assert tag("p", bold) == "<p><b>x</b></p>"
        assert tag("p", f"{bold}") == "<p>&lt;b&gt;x&lt;/b&gt;</p>"
        assert isinstance(join([bold, "<", None]), Html)

    def test_attributes_that_are_none_or_false_are_left_out(self) -> None:
        made = tag("button", "x", hidden=False, disabled=True, class_="a", data_step=3, id=None)
        assert made == '<button disabled class="a" data-step="3">x</button>'

    @given(st.text())
    def test_json_in_a_script_cannot_end_it_and_reads_back(self, content: str) -> None:
        written = script_json({"a": content + HOSTILE})
        assert "<" not in written
        assert json.loads(written) == {"a": content + HOSTILE}


class WellFormed(HTMLParser):
    """Raises where elements do not close in order."""

    VOID = frozenset({"meta", "br", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(text: str) -> None:
    parser = WellFormed()
    parser.feed(text)
    parser.close()
    assert parser.open == []


class TestCharts:
    def test_a_chart_has_title_legend_axes_and_a_text_alternative(self) -> None:
        lines = [Line("a", Series((1.0, 2.0), (0.0, 1.0))), Line("b", Series((1.0,), (0.5,)), "c2", Look.DOTS)]
        chart = line_chart("Reward <1>", lines, note="mean")
        check_html(chart)
        assert "Reward &lt;1&gt;" in chart
        assert 'aria-label="Reward &lt;1&gt;: a from 0 at step 1 to 1 at step 2' in chart
        assert "1.00" in chart
        data = json.loads(re.findall(r"<script[^>]*>(.*?)</script>", chart)[0])
        assert [line["y"] for line in data["lines"]] == [[0, 1], [0.5]]

    def test_a_chart_without_points_is_nothing(self) -> None:
        assert line_chart("Reward", [Line("a", Series((), ()))]) == ""

    def test_a_chart_of_nothing_but_zeros_is_a_line_of_text(self) -> None:
        zeros = Line("a", thinned([(1, 0.0), (2, 0.0), (3, 0.0)]))
        assert line_chart("Lag <1>", [zeros]) == '<p class="zero"><strong>Lag &lt;1&gt;</strong>: 0 in every step.</p>'
        assert "<svg" in line_chart("Lag", [zeros, Line("b", thinned([(2, 0.1)]))])

    def test_charts_of_one_quantity_have_one_scale(self) -> None:
        small, large = Line("a", thinned([(1, 0.0), (2, 0.1)])), Line("b", thinned([(1, 0.2), (2, 0.9)]))
        scale = shared_range([[small], [large], []])
        assert scale == (0.0, 0.9)
        marks = [
            re.findall(r'<div class="ys"[^>]*>(.*?)</div>', line_chart("x", [line], y_range=scale))
            for line in (small, large)
        ]
        assert marks[0] == marks[1] != []
        assert shared_range([[]]) is None

    @given(st.lists(st.tuples(st.integers(0, 1000), FINITE), min_size=1, max_size=30, unique_by=lambda p: p[0]))
    def test_points_stay_inside_the_drawing(self, points: list[tuple[int, float]]) -> None:
        assume(any(value for _, value in points))
        chart = line_chart("x", [Line("x", thinned(sorted(points)))], size=SMALL)
        path = re.findall(r'<path d="([^"]*)" class="(?:line|dots)[^"]*"', chart)[0]
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path):
            assert -0.1 <= float(x) <= 1000.1
            assert -0.1 <= float(y) <= 500.1

    def test_stacked_bars_name_the_share_of_each_layer(self) -> None:
        bins = bins_of([1.0, 2.0])
        layers = [Layer("waiting", [1.0, 1.0], "c1"), Layer("training", [3.0, 3.0], "c2")]
        chart = stacked_bars("Step", bins, layers, note="", unit="s")
        check_html(chart)
        assert "waiting 25 %" in chart
        assert "training 75 %" in chart
        assert stacked_bars("Step", bins, [Layer("waiting", [0.0, 0.0], "c1")], note="", unit="s") == ""

    def test_a_strip_is_darker_where_the_share_is_larger(self) -> None:
        chart = strip("Lag", bins_of([1.0, 2.0]), [Band("0", [1.0, 0.5]), Band("1", [0.0, 0.5])], note="", what="lag")
        check_html(chart)
        assert re.findall(r'fill-opacity="([\d.]+)"', chart) == ["1.00", "0.56", "0.56"]

    def test_binned_is_the_mean_of_each_bin(self) -> None:
        assert binned([1.0, 3.0, 5.0, 7.0], bins_of([1.0, 2.0, 3.0, 4.0], most=2)) == [2.0, 6.0]


class TestOutliers:
    def chart(self, values: list[float], dots: list[float] | None = None) -> str:
        lines = [Line("each step", thinned(enumerate(values)), look=Look.FAINT)]
        means = smoothed(values, 5)
        lines.append(Line("mean", thinned(enumerate(means))))
        if dots:
            lines.append(Line("held-out", thinned(enumerate(dots)), look=Look.DOTS))
        return line_chart("Loss", lines)

    def test_one_outlier_does_not_flatten_a_chart_and_is_marked(self) -> None:
        values = [math.sin(k) for k in range(100)]
        calm, wild = self.chart(values), self.chart([*values[:50], 1e6, *values[51:]])
        assert wild.count('class="outside"') == 1
        assert "beyond the axis: up to 1M, at step 50" in wild
        assert re.findall(r'top:[^"]*', wild) == re.findall(r'top:[^"]*', calm)
        assert "outside" not in calm

    def test_nothing_is_drawn_outside_the_frame(self) -> None:
        drawn = self.chart([math.sin(k) for k in range(50)] + [-1e9])
        ys = [
            float(y) for path in re.findall(r' d="([^"]*)"', drawn) for y in re.findall(r"[ML][\d.-]+ ([\d.-]+)", path)
        ]
        assert 0 <= min(ys) <= max(ys) <= 500

    def test_dots_and_steps_of_a_staircase_are_never_outliers(self) -> None:
        assert "outside" not in self.chart([0.1 + 0.001 * (k % 7) for k in range(40)], dots=[0.9])
        assert "outside" not in self.chart([0.0] * 50 + [1.0] * 50)
        assert "outside" not in self.chart([0.0] * 5 + [1.0])

    def test_thinned_values_keep_their_outlier(self) -> None:
        assert "beyond the axis: up to 1M" in self.chart([*(math.sin(k) for k in range(5_000)), 1e6])


def test_values_that_are_compared_have_the_same_decimals() -> None:
    assert alike((0.0011, 0.00303)) == ["0.00110", "0.00303"]
    assert alike((0.2, 0.85)) == ["0.200", "0.850"]
    assert alike((950.0, 12.5)) == ["950", "12"]
    assert alike((0.0, 2e6)) == ["0", "2M"]

"""The benchmarks run with the code as it is; how fast it is, they say themselves."""

from __future__ import annotations

import importlib
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.codec import codec_us
from benchmarks.support.plane_cases import FEW, Case
from benchmarks.support.plane_figures import RATIOS
from benchmarks.support.plane_opening import OPENERS, opened
from benchmarks.support.plane_timing import time_case
from benchmarks.support.published_weights import cpu_case, publish_figures
from benchmarks.support.router import router_us
from benchmarks.support.shm_speed import memory_put_get_us, shm_speed
from benchmarks.support.two_ranks import rank_figures

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_benchmark_imports_is_there(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


def test_figures_of_one_process() -> None:
    assert codec_us(repeats=2) > 0
    assert memory_put_get_us(repeats=3) > 0
    assert isinstance(router_us(ranks=2, requests=64, repeats=1), float)
    assert set(publish_figures(quick=True)) == {"publish_gb_s", "memcpy_gb_s", "publish_over_memcpy"}


@pytest.mark.long
def test_figures_of_several_processes() -> None:
    assert shm_speed(rows=8, tokens=64, repeats=2)["shm_put_get_gb_s"] > 0
    case = replace(cpu_case(quick=True), config=cpu_case(quick=True).config | {"num_hidden_layers": 1})
    assert rank_figures(case, passes=1)["two_ranks_over_one"] > 0


def test_what_a_ratio_compares_is_measured_or_left_out_in_words() -> None:
    assert {route for pair in RATIOS.values() for route in pair} <= OPENERS.keys()
    assert OPENERS["mooncake"]() == "there is no such adapter yet"


def test_extras_that_a_benchmark_names_are_there() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (root / "benchmarks").rglob("*.py")]
    named = {extra for source in sources for extra in re.findall(r"penstock\[([\w-]+)\]", source)}
    assert named
    assert named <= extras.keys()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_figures_of_the_data_plane_from_every_route_that_is_installed() -> None:
    before = dict(os.environ)
    with opened() as routes:
        timings = time_case(routes.routes, routes.reader, Case(4, 16, FEW), repeats=2, warm_ups=1)
    assert {"shm", "ray", "tq_raw"} <= set(timings.trips), routes.left_out
    assert dict(os.environ) == before
    assert set(timings.trips) | set(routes.left_out) == set(OPENERS)
    assert all(trip.put > 0 and trip.get > 0 for trips in timings.trips.values() for trip in trips)
    assert {len(trips) for trips in timings.trips.values()} == {2}

"""The figures of benchmarks/data_plane.py follow from the timings as its page says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.support.plane_cases import CASES, FEW, MANY, Batch, Case
from benchmarks.support.plane_figures import headline, shown, table
from benchmarks.support.plane_timing import Timings, Trip

SMALL, LARGE = Case(64, 1024, FEW), Case(512, 4096, FEW)


def timings(case: Case, **seconds: float) -> Timings:
    """Three rounds of a route with these seconds for put and get together; the last round is ten times slower."""
    rounds = (1.0, 1.0, 10.0)
    trips = {name: [Trip(0.75 * each * slow, 0.25 * each * slow) for slow in rounds] for name, each in seconds.items()}
    return Timings(case, 1_000_000, [0.5 * slow for slow in rounds], trips)


def test_ratios_are_medians_of_rounds_and_the_worst_case_counts() -> None:
    measured = [
        timings(SMALL, transfer_queue=8.2, tq_raw=8.0, shm=1.0),
        timings(LARGE, transfer_queue=8.8, tq_raw=8.0, shm=0.5),
    ]
    assert headline(measured) == {"tq_adapter_over_raw": 1.1, "shm_over_tq": 8.0, "shm_over_memcpy": 1.0}


def test_a_figure_whose_routes_were_not_measured_is_left_out() -> None:
    assert headline([timings(SMALL, shm=1.0)]) == {}
    assert headline([]) == {}


def test_the_table_has_medians_of_put_and_get_for_every_route_and_the_plain_copy() -> None:
    entries = table([timings(SMALL, shm=1.0)])
    assert [entry["route"] for entry in entries] == ["memcpy", "shm"]
    assert (entries[1]["put_ms"], entries[1]["get_ms"], entries[1]["over_memcpy"]) == (750.0, 250.0, 0.5)
    assert entries[1]["gb_s"] == 0.001
    assert "64 x 1024, 3 columns" in shown(entries)


@pytest.mark.parametrize("names", [FEW, MANY])
def test_batches_are_jagged_and_of_the_size_that_they_say(names: tuple[str, ...]) -> None:
    batch = Batch.of(Case(4, 100, names))
    lengths = batch.columns["input_ids"].lengths_R.tolist()
    assert all(75 <= length < 125 for length in lengths)
    assert len(set(lengths)) > 1
    assert batch.nbytes == sum(lengths) * (16 if names == FEW else 36)
    assert Batch.of(replace(batch.case, rows=4)).checksum == batch.checksum


def test_the_cases_are_two_sizes_with_three_and_eight_columns() -> None:
    assert [(case.rows, case.tokens, len(case.names)) for case in CASES] == [
        (64, 1024, 3),
        (64, 1024, 8),
        (512, 4096, 3),
        (512, 4096, 8),
    ]

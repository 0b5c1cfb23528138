"""How fast rows go from one process to another, through each adapter and without Penstock.

    python benchmarks/data_plane.py            # medians of 9 to 15 rounds
    python benchmarks/data_plane.py --quick    # of 3

Jagged rows, 64 of about 1,024 tokens and 512 of about 4,096, in 3 and in 8 per-token columns. This process puts them,
a Ray actor gets them, each measured by its own clock; every round takes all routes in turns and one plain copy of the
same bytes (`memcpy`, the limit). The last line is one JSON object. Ratios are medians of one round's ratios, and the
worst case counts:

- `tq_adapter_over_raw`, `mooncake_adapter_over_raw`: time of put and get through the adapter over that of the same
  rows through TransferQueue's own client, for its two backends.
- `shm_over_tq`: speed of `shm` over that of TransferQueue's own client with SimpleStorage.
- `shm_over_memcpy`: speed of `shm`, put and get together, over that of a plain copy, for 512 rows.
- `memory_put_get_us`: a group of 8 rows put into `memory` and fetched, the slower of 1,000 and 16,000 tokens per row.
- `events_overhead`: what observing the data plane (`data_plane.observe`) adds to a put and a get of 64 rows through
  `shm`, as a fraction; `events_us` is that in microseconds, and `put_get_us` what it is a fraction of.
- `table`: every route in every case; `left_out`: what was not measured here, and why.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support.events_overhead import events_overhead
from benchmarks.support.plane_cases import CASES, LARGE_ROWS, Batch
from benchmarks.support.plane_figures import headline, shown, table
from benchmarks.support.plane_opening import opened
from benchmarks.support.plane_timing import time_case
from benchmarks.support.shm_speed import memory_put_get_us, shm_speed
from penstock.config.models import DataPlaneConfig
from penstock.data_plane.opening import connect, open_data_plane


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    figures: dict[str, Any] = {}
    with opened() as routes:
        measured = []
        for case in CASES if routes.routes else ():
            repeats = 3 if quick else 9 if case.rows >= LARGE_ROWS else 15
            measured.append(time_case(routes.routes, routes.reader, case, repeats, warm_ups=1 if quick else 2))
        figures |= headline(measured)
        left_out = dict(routes.left_out)
    if not measured:  # this figure needs no Ray
        figures["shm_over_memcpy"] = shm_speed(repeats=9 if quick else 25)["shm_over_memcpy"]
    figures["memory_put_get_us"] = max(memory_put_get_us(tokens=tokens) for tokens in (1_000, 16_000))
    figures |= _events(repeats=50 if quick else 200)
    entries = table(measured)
    print(shown(entries))
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    for name, value in figures.items():
        print(f"{name:32} {value:.3f}")
    print(json.dumps(figures | {"left_out": left_out, "table": entries}))


def _events(repeats: int) -> dict[str, float]:
    """Rows of the smallest case through `shm`: its owner puts, a client gets over a socket."""
    plain = DataPlaneConfig(adapter="shm", capacity_gb=0.1, observe=False)
    owner = open_data_plane(plain)
    reader = connect(owner.address())
    try:
        return events_overhead(owner, Batch.of(CASES[0]).columns, reader=reader, repeats=repeats)
    finally:
        reader.close()
        owner.close()


if __name__ == "__main__":
    main()

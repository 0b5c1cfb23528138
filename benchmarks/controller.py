"""What the replay buffer costs the controller with many groups buffered.

For every sampler the buffer is filled with groups that its own admissions allow, committed in random order and spread
over five weight versions or target steps where the policy lets them. Then, at a steady fill:

- `select ms`: one `select` of `--select` groups, median and 99th percentile;
- `selectable us`: one `selectable`, which a waiting train pump evaluates at every commit;
- `groups/s`: whole passes of one group at a time through admission, reserve, commit and select.

The last line is one JSON object with the figures of the slowest sampler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.ready_first import ReadyFirst
from penstock.buffer.samplers.weight_fifo import WeightFifo
from penstock.buffer.samplers.windowed import Order, Windowed
from penstock.buffer.slots import Slot
from penstock.data_plane.meta import KVBatchMeta

SPREAD = 5
GROUP_SIZE = 8


@dataclass(frozen=True)
class Case:
    """A sampler, and whether the fill moves through several weight versions."""

    name: str
    sampler: StalenessSampler
    moves_versions: bool


@dataclass(frozen=True)
class Figures:
    """What was measured for one sampler."""

    name: str
    select_ms: float
    select_ms_p99: float
    selectable_us: float
    groups_per_s: float


def cases(buffered: int) -> list[Case]:
    """Every sampler, with settings under which `buffered` groups are admitted at once."""
    per_step, ahead = -(-buffered // SPREAD), SPREAD - 1
    return [
        Case("on_policy", OnPolicy(buffered), False),
        Case("windowed, oldest", Windowed(per_step, ahead), True),
        Case("windowed, freshest", Windowed(per_step, ahead, order=Order.FRESHEST), True),
        Case("windowed, over_sampling", Windowed(per_step, ahead, over_sampling=True), True),
        Case("in_order", InOrder(per_step, ahead), False),
        Case("in_order, one step", InOrder(buffered, 0), False),
        Case("in_order, strict", InOrder(per_step, ahead, strict_sequence=True), False),
        Case("weight_fifo", WeightFifo(per_step, ahead, ahead), True),
        Case("ready_first", ReadyFirst(per_step, ahead), True),
    ]


class Bench:
    """A buffer that is kept at `buffered` ready groups."""

    def __init__(self, case: Case, buffered: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._ids = (f"group{i:08d}" for i in itertools.count())
        self.buffer = ReplayBuffer(case.sampler, buffered)
        for version in range(SPREAD):
            if case.moves_versions:
                self.buffer.advance(trainer_version=version, served_version=version)
            self.add(min(-(-buffered // SPREAD), self.buffer.free_permits))
        assert (self.buffer.ready, self.buffer.reserved) == (buffered, 0)

    def dispatch(self, group_id: str) -> None:
        admission = self.buffer.try_admission()
        assert admission is not None
        self.buffer.reserve(group_id, admission.start_version, admission.target_step)

    def add(self, count: int) -> None:
        """Dispatch groups and commit them in random order."""
        group_ids = list(itertools.islice(self._ids, count))
        for group_id in group_ids:
            self.dispatch(group_id)
        for group_id in self._random.sample(group_ids, count):
            self.buffer.commit(group_id, rows(group_id), self.buffer.clock.served_version)

    def put_back(self, selected: list[Slot]) -> None:
        """As many new groups as were selected; the old ones count as filtered, so that quota allows it."""
        for slot in selected:
            self.buffer.refund(slot)
        self.add(len(selected))

    def select_times(self, groups: int, repeats: int) -> Iterator[float]:
        """Seconds of each select."""
        for _ in range(repeats):
            started = time.perf_counter()
            selected = self.buffer.select(groups)
            yield time.perf_counter() - started
            assert len(selected) == groups
            self.put_back(selected)

    def selectable_seconds(self, repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            self.buffer.selectable()
        return (time.perf_counter() - started) / repeats

    def groups_per_second(self, groups: int) -> float:
        """Each pass: select one group, count it as filtered, dispatch and commit another."""
        fresh = [(group_id, rows(group_id)) for group_id in itertools.islice(self._ids, groups)]
        version = self.buffer.clock.served_version
        started = time.perf_counter()
        for group_id, meta in fresh:
            slot = self.buffer.select_one_group()
            assert slot is not None
            self.buffer.refund(slot)
            self.dispatch(group_id)
            self.buffer.commit(group_id, meta, version)
        return groups / (time.perf_counter() - started)


def rows(group_id: str) -> KVBatchMeta:
    return KVBatchMeta(
        partition_id="train",
        sample_ids=tuple(f"{group_id}_g{i}" for i in range(GROUP_SIZE)),
        fields=frozenset({"input_ids"}),
        sequence_lengths=(512,) * GROUP_SIZE,
    )


def measure(case: Case, buffered: int, select: int, repeats: int) -> Figures:
    bench = Bench(case, buffered, seed=0)
    times_ms = sorted(1e3 * seconds for seconds in bench.select_times(select, repeats))
    return Figures(
        name=case.name,
        select_ms=statistics.median(times_ms),
        select_ms_p99=times_ms[int(0.99 * (len(times_ms) - 1))],
        selectable_us=1e6 * bench.selectable_seconds(min(repeats, 200)),
        groups_per_s=bench.groups_per_second(5 * repeats),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; well under a minute")
    parser.add_argument("--buffered", type=int, default=10_000, help="groups in the buffer")
    parser.add_argument("--select", type=int, default=8, help="groups per select")
    arguments = parser.parse_args()
    repeats = 500 if arguments.quick else 5_000

    table = Table(title=f"replay buffer with {arguments.buffered} ready groups, {arguments.select} per select")
    for column in ("sampler", "select ms", "p99 ms", "selectable us", "groups/s"):
        table.add_column(column, justify="left" if column == "sampler" else "right")
    figures = [measure(case, arguments.buffered, arguments.select, repeats) for case in cases(arguments.buffered)]
    for each in figures:
        table.add_row(
            each.name,
            f"{each.select_ms:.4f}",
            f"{each.select_ms_p99:.4f}",
            f"{each.selectable_us:.1f}",
            f"{each.groups_per_s:,.0f}",
        )
    Console().print(table)
    slowest = max(figures, key=lambda each: each.select_ms)
    print(
        json.dumps(
            {
                "buffered_groups": arguments.buffered,
                "groups_per_select": arguments.select,
                f"select_ms_at_{arguments.buffered // 1000}k": round(slowest.select_ms, 4),
                "slowest_sampler": slowest.name,
                "groups_per_s": round(min(each.groups_per_s for each in figures)),
            }
        )
    )


if __name__ == "__main__":
    main()

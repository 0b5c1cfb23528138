"""Finds a run whose data plane is too small for its steps, at once: nobody waits for room that never comes."""

from __future__ import annotations

import asyncio
import contextlib

from penstock.buffer.slots import SlotState
from penstock.controller.parts import Parts
from penstock.controller.pumps.train import TrainPump
from penstock.controller.pumps.weight_sync import WeightSync
from penstock.data_plane.client import DataPlaneOwner
from penstock.data_plane.fields import group_of
from penstock.data_plane.room import Jam
from penstock.errors import DataPlaneFull
from penstock.rollout.manager import PARTITION

_LOOK_SECONDS = 0.5
"""Between two looks at a data plane in which puts wait."""


class RoomWatch:
    """Ends the run with `DataPlaneFull` if a put waits for room that nobody can make.

    Rows are cleared by the train pump: at the end of a step, or when it evicts or filters groups. So no room comes if
    all memory belongs to rows of the open step and of groups that are ready, and the train pump waits: for a group that
    the sampler lets it select, for running groups to end (`weight_sync.mode: drain`), or for the trainer, which waits
    for room for columns of its own.

    Invariants: looks only while a put waits; acts only on what two looks in a row found unchanged, so a moment between
    a put and its group's commit is none.

    Worked example: a step needs 4 groups of 3 GB, and the capacity is 8 GB. Two groups are trained, the third waits
    for room. The first look finds two groups in the data plane, both in the open step, and the pump waiting for
    another; half a second later the second finds the same, and the run ends: 12 GB are needed.
    """

    def __init__(self, parts: Parts, training: TrainPump, sync: WeightSync, groups: int) -> None:
        """`groups` are what a step needs."""
        self._room = parts.room
        self._buffer = parts.buffer
        self._training = training
        self._sync = sync
        self._groups = groups

    async def run(self) -> None:
        """Watch until cancelled; raises `DataPlaneFull`. Ends at once if the data plane has no limit."""
        if self._room is None:
            return
        loop, full = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(full.set)

        self._room.when_full(tell)
        try:
            while True:
                await full.wait()
                full.clear()
                await self._look_while_full(self._room)
        finally:
            self._room.when_full(lambda: None)

    async def _look_while_full(self, room: DataPlaneOwner) -> None:
        before: Jam | None = None
        while room.is_waited_for:
            jam = self._stuck(room)
            if jam is not None and jam == before:
                why = self._told(jam)
                room.refuse_waiting(why)
                raise DataPlaneFull(why)
            before = jam
            await asyncio.sleep(_LOOK_SECONDS)

    def _stuck(self, room: DataPlaneOwner) -> Jam | None:
        """What waits for room that nobody can make, as far as one look tells."""
        jam = room.jam(PARTITION)
        if jam is None or not (jam.adds or self._training.waits_for_groups or self._sync.drains):
            return None
        known = {slot.group_id for slot in self._buffer.slots(SlotState.READY)} | self._training.open_groups
        return jam if {group_of(sample) for sample in jam.sample_ids} <= known else None

    def _told(self, jam: Jam) -> str:
        groups = len({group_of(sample) for sample in jam.sample_ids})
        of_step = len(self._training.open_groups)
        others = groups - of_step
        needed = max(jam.used + jam.needed, jam.used // max(groups, 1) * (others + self._groups))
        what = "columns for rows that are there" if jam.adds else "the next group"
        held = f"{of_step} of the {self._groups} groups of step {self._buffer.clock.step + 1}"
        return (
            f"the data plane is too small for a step: it is full with {held} and {others} that wait for later steps "
            f"({jam.used / 1e9:.3g} of {jam.capacity / 1e9:.3g} GB), {what} need{'' if jam.adds else 's'} "
            f"{jam.needed / 1e9:.3g} GB, and nothing can be cleared before the step has all of its groups. Raise "
            f"data_plane.capacity_gb to {needed / 1e9:.3g} or more, or lower training.prompt_groups_per_step, "
            "rollout.group_size or buffer.max_buffered_groups"
        )

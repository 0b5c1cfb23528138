"""Writes the groups of a recording as they are made: each is on disk before the controller learns that it exists."""

from __future__ import annotations

import asyncio

from penstock.data_plane import fields
from penstock.data_plane.client import SampleBatch
from penstock.rollout.manager import PushedGroup
from penstock.rollout.prompts import PromptVisit
from penstock.rollout.recorded import RecordedGroup, RecordingFolder
from penstock.runtime.cancellation import to_the_end

_WRITERS = 2
"""Groups that are written at the same time; the others wait with their slots taken, so rollouts cannot run ahead of the
disk."""


class RecordingWriter:
    """Used by `RolloutManager`, which has the rows in hand when it puts them: nothing is read back for a recording.

    Invariant: when `write` returns, the group is on disk, whole. A full disk raises a `RecordError`, which ends the
    run: it is not the prompt's fault.
    """

    def __init__(self, folder: RecordingFolder) -> None:
        self._folder = folder
        self._writers = asyncio.Semaphore(_WRITERS)

    async def write(self, visit: PromptVisit, start_version: int, pushed: PushedGroup, rows: SampleBatch) -> None:
        """Write a group. Cancelled, it ends only when a write that has begun is finished."""
        async with self._writers:
            group = _describe(visit, start_version, pushed, rows)
            # A write that has begun is finished: the next attempt at the same prompt writes to the same place.
            await to_the_end(asyncio.to_thread(self._folder.write, group, rows))


def _describe(visit: PromptVisit, start_version: int, pushed: PushedGroup, rows: SampleBatch) -> RecordedGroup:
    return RecordedGroup(
        epoch=visit.epoch,
        prompt_id=visit.prompt.prompt_id,
        prompt=visit.prompt.text,
        position=visit.position,
        start_version=start_version,
        end_version=pushed.end_version,
        largest_token=int(rows.jagged(fields.INPUT_IDS).values.max()),
        sequence_lengths=list(pushed.meta.sequence_lengths),
        tags=[dict(tags) for tags in pushed.meta.tags],
    )

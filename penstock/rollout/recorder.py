"""Recording: every group is on disk before the controller learns that it exists."""

from __future__ import annotations

import asyncio

from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.rollout.manager import GroupSource, PushedGroup
from penstock.rollout.prompts import PromptVisit
from penstock.rollout.recorded import RecordedGroup, RecordingFolder
from penstock.runtime.cancellation import to_the_end

_WRITERS = 2
"""Groups that are written at the same time; the others wait with their slots taken, so rollouts cannot run ahead of the
disk."""


class RecordingSource(GroupSource):
    """Passes groups on from another source, once they are written.

    Invariant: a group that was passed on is on disk, whole. A group that could not be written leaves no rows behind in
    the data plane; a full disk raises a `RecordError`, which ends the run: it is not the prompt's fault.
    """

    def __init__(self, source: GroupSource, data_plane: DataPlaneClient, folder: RecordingFolder) -> None:
        self._source = source
        self._data_plane = data_plane
        self._folder = folder
        self._writers = asyncio.Semaphore(_WRITERS)

    async def generate_and_push(self, visit: PromptVisit, group_id: str, start_version: int) -> PushedGroup:
        """Generate with the other source, then write."""
        pushed = await self._source.generate_and_push(visit, group_id, start_version)
        try:
            async with self._writers:
                rows = await self._data_plane.get_samples_async(pushed.meta, fields.ROLLOUT_FIELDS)
                group = _describe(visit, start_version, pushed, rows)
                # A write that has begun is finished: the next attempt at the same prompt writes to the same place.
                await to_the_end(asyncio.to_thread(self._folder.write, group, rows))
        except BaseException:
            await self._data_plane.clear_samples_async(pushed.meta.sample_ids, pushed.meta.partition_id)
            raise
        return pushed


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

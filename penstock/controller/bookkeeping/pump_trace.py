"""What the pumps report to the timeline, in the controller's own terms."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.slots import Slot
from penstock.controller.bookkeeping.gauges import Gauges
from penstock.controller.pumps.advantage import ScoredChunk, rows_by_group
from penstock.observe.group_lives import GroupEnd
from penstock.observe.timeline import Timeline, Track
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.manager import PushedGroup
from penstock.rollout.prompts import PromptVisit
from penstock.weights.synchronizer import SyncReport


class PumpTrace:
    """Records facts about groups, steps and weights as they happen; each call also reads the gauges.

    Steps are numbered from 1, as in `metrics.jsonl`.
    """

    def __init__(self, timeline: Timeline, buffer: ReplayBuffer, engines: EngineFleet) -> None:
        self._timeline = timeline
        self._groups = timeline.groups
        self._buffer = buffer
        self._gauges = Gauges(timeline, buffer, engines)

    def track(self, name: str) -> Track:
        """The track of a pump."""
        return self._timeline.track("controller", name)

    def dispatched(self, visit: PromptVisit, slot: Slot) -> None:
        """A group, or the next attempt at its prompt, is under way."""
        self._groups.dispatched(
            slot.group_id,
            prompt_id=visit.prompt.prompt_id,
            epoch=visit.epoch,
            start_version=slot.start_version,
            target_step=None if slot.target_step is None else slot.target_step + 1,
            redispatches=visit.redispatches,
        )
        self._gauges.read()

    def resting(self, group_id: str, cause: str) -> None:
        """A group's attempt failed; its prompt will be tried again."""
        self._groups.resting(group_id, cause=cause)
        self._gauges.read()

    def committed(self, group_id: str, pushed: PushedGroup) -> None:
        """A group is ready."""
        self._groups.committed(group_id, end_version=pushed.end_version, tokens=pushed.meta.total_tokens)
        self._gauges.read()

    def selected(self, slots: Iterable[Slot], step: int) -> None:
        """A step has taken these groups."""
        version = self._buffer.clock.trainer_version
        for slot in slots:
            self._groups.selected(slot.group_id, step=step, lag=version - slot.start_version)
        self._gauges.read()

    def scored(self, chunk: ScoredChunk) -> None:
        """The rewards of these groups are known."""
        rewards: list[float] = chunk.rewards_S.tolist()
        for group_id, rows in zip(chunk.meta.group_ids, rows_by_group(chunk.meta), strict=True):
            self._groups.note(group_id, reward_mean=round(sum(rewards[row] for row in rows) / len(rows), 6))

    def ended(self, group_id: str, how: GroupEnd, **facts: str) -> None:
        """A group has ended; the first end counts."""
        self._groups.ended(group_id, how, **facts)
        self._gauges.read()

    def published(self, report: SyncReport) -> None:
        """The engines serve new weights."""
        self._gauges.paused(report.version, report.pause_seconds)

    def step_ended(self) -> None:
        """A step and its weight update are over."""
        self._gauges.step_ended()

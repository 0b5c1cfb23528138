"""What has happened since the run began, in numbers, for the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.controller.failures.drops import DropBook
from penstock.controller.failures.totals import failure_totals

_COUNTED = {
    "rollout/groups_evicted": "group_evicted",
    "rollout/groups_aborted": "group_aborted",
    "rollout/groups_filtered": "group_filtered",
    "rollout/groups_retried": "rollout_retried",
    "data/overlong_dropped": "prompt_overlong",
    "data/overlong_truncated": "prompt_truncated",
}
"""Metric, and the event that it counts."""


def run_totals(buffer: ReplayBuffer, committed: int, drops: DropBook, events: Mapping[str, int]) -> dict[str, float]:
    """Groups, prompts and failures so far; `events` are the counts of the event log."""
    totals = {
        "buffer/ready": buffer.ready,
        "buffer/reserved": buffer.reserved,
        "rollout/groups_dispatched": buffer.dispatched,
        "rollout/groups_committed": committed,
        "rollout/prompts_dropped": drops.dropped,
        "rollout/prompts_replaced": drops.dropped if drops.returns_quota else 0,
        **{metric: events.get(event, 0) for metric, event in _COUNTED.items()},
    }
    return {metric: float(total) for metric, total in totals.items()} | failure_totals(events)

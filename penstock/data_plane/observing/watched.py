"""A run's own client, connected to what the run records about it."""

from __future__ import annotations

from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.observing.client import ObservedClient
from penstock.data_plane.observing.spans import OperationSpans
from penstock.data_plane.observing.step_use import StepUse
from penstock.observe.timeline import Timeline
from penstock.runtime.workers.repeated import RepeatedCalls


def watched_use(
    client: DataPlaneClient, timeline: Timeline | None, row_worker: RepeatedCalls | None = None
) -> StepUse | None:
    """What gives a step's metrics about the data plane, and draws its operations; None if it is not observed."""
    if not isinstance(client, ObservedClient):
        return None
    spans = None if timeline is None else OperationSpans(timeline)
    if spans is not None:
        client.listen(spans.hear)
    return StepUse(client, spans, None if row_worker is None else lambda: row_worker.ask("data_plane_use"))

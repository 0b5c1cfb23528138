"""The worker that reads and writes rows for the controller: archives of checkpoints, and the samples that are shown."""

from __future__ import annotations

from penstock.config.models import DataPlaneConfig
from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.data_plane.client import DataPlaneAddress, DataPlaneClient, DataPlaneOwner
from penstock.data_plane.observing.totals import ClientUse
from penstock.data_plane.opening import connect
from penstock.data_plane.row_files import RowFiles
from penstock.rollout.sample_texts import SampleReader
from penstock.runtime.workers import Placement, WorkerHandle, WorkerKind, WorkerSpec, start
from penstock.runtime.workers.repeated import RepeatedCalls

_NAME = "data plane worker"


class RowWorker(RowFiles, SampleReader):
    """All that is done with rows apart from rollouts and training, by metadata.

    It keeps nothing between two calls, and every call may be repeated, so another one can take its place at any time.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        RowFiles.__init__(self, client)
        SampleReader.__init__(self, client)

    async def data_plane_use(self) -> ClientUse | None:
        """What its own client has done so far; None if it has none, or does not observe it."""
        return None

    def close(self) -> None:
        """The client belongs to whoever made it."""


class _ConnectedRowWorker(RowWorker):
    """One with a connection of its own."""

    async def data_plane_use(self) -> ClientUse | None:
        return self._client.use()

    def close(self) -> None:
        self._client.close()


def connected(address: DataPlaneAddress) -> RowWorker:
    """A worker in any process that can reach the data plane."""
    return _ConnectedRowWorker(connect(address))


def begin_row_worker(
    config: DataPlaneConfig, data_plane: DataPlaneOwner, timeouts: TimeoutsConfig, *, at_once: bool = True
) -> RepeatedCalls:
    """Calls of a row worker: in a process of its own if the rows can be reached from there, else in a thread.

    A process is started `at_once`, or by the first call, and not waited for; one that is not ready after
    `timeouts.start_seconds`, or then shows no sign of life for `timeouts.silence_seconds`, is killed, and another takes
    its place.
    """
    if config.adapter == "memory":
        spec, kind = WorkerSpec(f"{__name__}:RowWorker", {"client": data_plane}), WorkerKind.THREAD
    else:
        spec, kind = WorkerSpec(f"{__name__}:connected", {"address": data_plane.address()}), WorkerKind.PROCESS

    def begin() -> WorkerHandle:
        # It copies and waits for the disk: more threads would only take cores from those who compute.
        threads = 1 if kind is WorkerKind.PROCESS else 0
        return start(
            spec,
            Placement(kind, _NAME, threads),
            silence_seconds=timeouts.silence_seconds,
            build_seconds=timeouts.start_seconds,
        )

    calls = RepeatedCalls(begin)
    if at_once and kind is WorkerKind.PROCESS:
        calls.begin_now()
    return calls

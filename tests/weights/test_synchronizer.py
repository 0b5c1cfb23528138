"""Weight sync: everybody on one version, or out of serving."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.errors import WeightSyncError
from penstock.weights.source import WeightSource
from penstock.weights.synchronizer import WeightSynchronizer


@dataclass
class Receiver:
    """Records the calls; fails an update when told to."""

    name: str
    fails: bool = False
    version: int = 0
    serving: bool = True
    calls: list[str] = field(default_factory=list)

    async def pause(self) -> None:
        self.calls.append("pause")
        self.serving = False

    async def resume(self) -> None:
        self.calls.append("resume")
        self.serving = True

    async def update_weights(self, source: WeightSource) -> None:
        self.calls.append("update")
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("link down")
        self.version = source.version


def source(version: int) -> WeightSource:
    return WeightSource(version, lambda: iter(()))


async def test_all_pause_before_any_update_and_resume_on_the_new_version() -> None:
    receivers = [Receiver("a"), Receiver("b")]
    report = await WeightSynchronizer(receivers).publish(source(3))
    assert report.version == 3
    assert report.failed == ()
    assert all(r.calls == ["pause", "update", "resume"] and r.version == 3 and r.serving for r in receivers)


async def test_a_receiver_that_fails_stays_out_of_serving_until_a_later_sync() -> None:
    good, bad = Receiver("good"), Receiver("bad", fails=True)
    synchronizer = WeightSynchronizer([good, bad])
    report = await synchronizer.publish(source(1))
    assert report.failed == ("bad",)
    assert (good.serving, good.version) == (True, 1)
    assert (bad.serving, bad.version) == (False, 0)
    bad.fails = False
    await synchronizer.publish(source(2))
    assert (bad.serving, bad.version) == (True, 2)


async def test_no_receiver_left_is_an_error_with_the_cause() -> None:
    only = Receiver("only", fails=True)
    with pytest.raises(WeightSyncError, match="only: link down") as caught:
        await WeightSynchronizer([only]).publish(source(1))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not only.serving

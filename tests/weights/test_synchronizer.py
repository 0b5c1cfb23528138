"""Weight sync: everybody on one version, or out of serving."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.errors import SetupError, WeightSyncError
from penstock.weights.source import WeightSource
from penstock.weights.synchronizer import WeightSynchronizer
from tests.support.clocks import StoppableClock


@dataclass
class Receiver:
    """Records the calls; fails an update when told to."""

    name: str
    fails: bool = False
    fails_in: str = "update"
    version: int = 0
    serving: bool = True
    calls: list[str] = field(default_factory=list)

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.fails and name == self.fails_in:
            raise RuntimeError("link down")

    async def pause(self) -> None:
        self.serving = False
        await self._called("pause")

    async def resume(self) -> None:
        await self._called("resume")
        self.serving = True

    async def update_weights(self, source: WeightSource) -> None:
        await self._called("update")
        self.version = source.version


def source(version: int) -> WeightSource:
    return WeightSource(version, lambda: iter(()))


async def test_all_pause_before_any_update_and_resume_on_the_new_version() -> None:
    receivers = [Receiver("a"), Receiver("b")]
    report = await WeightSynchronizer(receivers).publish(source(3))
    assert report.version == 3
    assert report.failed == {}
    assert all(r.calls == ["pause", "update", "resume"] and r.version == 3 and r.serving for r in receivers)


@pytest.mark.parametrize("fails_in", ["pause", "update", "resume"])
async def test_a_receiver_that_fails_stays_out_of_serving_until_a_later_sync(fails_in: str) -> None:
    good, bad = Receiver("good"), Receiver("bad", fails=True, fails_in=fails_in)
    synchronizer = WeightSynchronizer([good, bad])
    report = await synchronizer.publish(source(1))
    assert report.failed == {"bad": "RuntimeError: link down"}
    assert (good.serving, good.version) == (True, 1)
    assert not bad.serving
    bad.fails = False
    await synchronizer.publish(source(2))
    assert (bad.serving, bad.version) == (True, 2)


async def test_no_receiver_left_is_an_error_with_the_cause() -> None:
    only = Receiver("only", fails=True)
    with pytest.raises(WeightSyncError, match="only: link down") as caught:
        await WeightSynchronizer([only]).publish(source(1))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not only.serving


async def test_a_cancelled_sync_is_carried_to_its_end() -> None:
    receiver = Receiver("a")
    task = asyncio.create_task(WeightSynchronizer([receiver]).publish(source(1)))
    while "update" not in receiver.calls:  # noqa: ASYNC110 - the receiver is looked at, not told to signal
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert receiver.serving
    assert receiver.version == 1


def test_receivers_need_names_of_their_own() -> None:
    with pytest.raises(SetupError, match="names must be unique"):
        WeightSynchronizer([Receiver("a"), Receiver("a")])


async def test_without_receivers_a_version_is_served_when_it_is_published() -> None:
    report = await WeightSynchronizer([]).publish(source(3))
    assert (report.version, dict(report.failed)) == (3, {})


@dataclass
class Stuck(Receiver):
    """Never answers one of the calls until it is let; then it does what it was asked, late."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails and name == self.fails_in:
            await self.go.wait()


@pytest.mark.parametrize("stuck_in", ["pause", "update", "resume"])
async def test_a_receiver_that_never_answers_stays_out_while_the_others_go_on(stuck_in: str) -> None:
    good, stuck = Receiver("good"), Stuck("stuck", fails=True, fails_in=stuck_in)
    synchronizer = WeightSynchronizer([good, stuck], limit_seconds=0.05)
    async with asyncio.timeout(5):
        report = await synchronizer.publish(source(1))
        called = list(stuck.calls)
        assert "had no answer after 0.05 s (runtime.timeouts.weights_seconds)" in report.failed["stuck"]
        assert (good.serving, good.version) == (True, 1)
        report = await synchronizer.publish(source(2))
        assert "has not answered an earlier weight update yet" in report.failed["stuck"]
        assert stuck.calls == called, "it is not called before it has answered"
        assert (good.serving, good.version, stuck.serving) == (True, 2, False)
        stuck.fails = False
        stuck.go.set()
        await synchronizer._late["stuck"]
        assert not stuck.serving, "a late answer does not bring it back: its version is old"
        report = await synchronizer.publish(source(3))
    assert report.failed == {}
    assert (stuck.serving, stuck.version) == (True, 3)


async def test_no_receiver_that_answers_is_an_error_that_names_the_limit() -> None:
    with pytest.raises(WeightSyncError, match=r"stuck: update_weights had no answer after 0\.05 s"):
        await WeightSynchronizer([Stuck("stuck", fails=True)], limit_seconds=0.05).publish(source(1))


async def test_a_cancelled_sync_is_carried_to_its_end_but_not_when_that_is_given_up() -> None:
    stuck = Stuck("stuck", fails=True)
    synchronizer = WeightSynchronizer([stuck], limit_seconds=600.0)
    task = asyncio.create_task(synchronizer.publish(source(1)))
    while "update" not in stuck.calls:  # noqa: ASYNC110 - the receiver is looked at, not told to signal
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    synchronizer.give_up()
    async with asyncio.timeout(5):
        with pytest.raises(WeightSyncError, match="had no answer when the run ended"):
            await task
    assert not stuck.serving


async def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppableClock(monkeypatch)
    slow, taken = Receiver("slow"), asyncio.Event()

    async def update(source: WeightSource) -> None:
        clock.stopped_for(3600)
        await taken.wait()

    slow.update_weights = update  # type: ignore[method-assign]
    publishing = asyncio.create_task(WeightSynchronizer([slow], limit_seconds=20).publish(source(1)))
    await asyncio.sleep(0.02)
    assert not publishing.done()
    taken.set()
    assert (await publishing).failed == {}

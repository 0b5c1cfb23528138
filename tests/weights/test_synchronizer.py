"""Weight sync: everybody on one version, or out of serving."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.errors import SetupError, WeightSyncError
from penstock.weights.plan import Transport
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.site import site_of
from penstock.weights.synchronizer import WeightSynchronizer
from tests.support.clocks import StoppableClock
from tests.support.publications import without_tensors as published


@dataclass
class Receiver:
    """Records the calls; fails an update when told to."""

    name: str
    fails: bool = False
    fails_in: str = "apply"
    version: int = 0
    prepared: int = 0
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

    @property
    def site(self) -> WeightSite:
        return site_of()

    async def prepare(self, publication: WeightPublication) -> None:
        await self._called("prepare")
        self.prepared = publication.version

    async def apply(self, publication: WeightPublication) -> None:
        await self._called("apply")
        assert not self.serving
        assert self.prepared == publication.version
        self.version = publication.version


async def test_all_pause_before_any_update_and_resume_on_the_new_version() -> None:
    receivers = [Receiver("a"), Receiver("b")]
    report = await WeightSynchronizer(receivers).publish(published(3))
    assert report.version == 3
    assert report.failed == {}
    assert all(r.calls == ["prepare", "pause", "apply", "resume"] and r.version == 3 and r.serving for r in receivers)


@pytest.mark.parametrize("fails_in", ["prepare", "pause", "apply", "resume"])
async def test_a_receiver_that_fails_stays_out_of_serving_until_a_later_sync(fails_in: str) -> None:
    good, bad = Receiver("good"), Receiver("bad", fails=True, fails_in=fails_in)
    synchronizer = WeightSynchronizer([good, bad])
    report = await synchronizer.publish(published(1))
    assert report.failed == {"bad": "RuntimeError: link down"}
    assert (good.serving, good.version) == (True, 1)
    assert not bad.serving
    bad.fails = False
    await synchronizer.publish(published(2))
    assert (bad.serving, bad.version) == (True, 2)


async def test_no_receiver_left_is_an_error_with_the_cause() -> None:
    only = Receiver("only", fails=True)
    with pytest.raises(WeightSyncError, match="only: link down") as caught:
        await WeightSynchronizer([only]).publish(published(1))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not only.serving


async def test_a_cancelled_sync_is_carried_to_its_end() -> None:
    receiver = Receiver("a")
    task = asyncio.create_task(WeightSynchronizer([receiver]).publish(published(1)))
    while "apply" not in receiver.calls:  # noqa: ASYNC110 - the receiver is looked at, not told to signal
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
    report = await WeightSynchronizer([]).publish(published(3))
    assert (report.version, dict(report.failed)) == (3, {})


@dataclass
class Stuck(Receiver):
    """Never answers one of the calls until it is let; then it does what it was asked, late."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails and name == self.fails_in:
            await self.go.wait()


@pytest.mark.parametrize("stuck_in", ["prepare", "pause", "apply", "resume"])
async def test_a_receiver_that_never_answers_stays_out_while_the_others_go_on(stuck_in: str) -> None:
    good, stuck = Receiver("good"), Stuck("stuck", fails=True, fails_in=stuck_in)
    synchronizer = WeightSynchronizer([good, stuck], limit_seconds=0.2)
    async with asyncio.timeout(60):
        report = await synchronizer.publish(published(1))
        called = list(stuck.calls)
        assert "had no answer after 0.2 s (runtime.timeouts.weights_seconds)" in report.failed["stuck"]
        assert (good.serving, good.version) == (True, 1)
        report = await synchronizer.publish(published(2))
        assert "has not answered an earlier weight update yet" in report.failed["stuck"]
        assert stuck.calls == called, "it is not called before it has answered"
        assert (good.serving, good.version, stuck.serving) == (True, 2, False)
        stuck.fails = False
        stuck.go.set()
        await synchronizer._calls.late["stuck"]
        assert not stuck.serving, "a late answer does not bring it back: its version is old"
        report = await synchronizer.publish(published(3))
    assert report.failed == {}
    assert (stuck.serving, stuck.version) == (True, 3)


async def test_no_receiver_that_answers_is_an_error_that_names_the_limit() -> None:
    with pytest.raises(WeightSyncError, match=r"stuck: apply had no answer after 0\.2 s"):
        await WeightSynchronizer([Stuck("stuck", fails=True)], limit_seconds=0.2).publish(published(1))


async def test_a_cancelled_sync_is_carried_to_its_end_but_not_when_that_is_given_up() -> None:
    stuck = Stuck("stuck", fails=True)
    synchronizer = WeightSynchronizer([stuck], limit_seconds=600.0)
    task = asyncio.create_task(synchronizer.publish(published(1)))
    while "apply" not in stuck.calls:  # noqa: ASYNC110 - the receiver is looked at, not told to signal
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    synchronizer.give_up()
    async with asyncio.timeout(60):
        with pytest.raises(WeightSyncError, match="had no answer when the run ended"):
            await task
    assert not stuck.serving


async def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppableClock(monkeypatch)
    slow, taken = Receiver("slow"), asyncio.Event()

    async def apply(publication: WeightPublication) -> None:
        clock.stopped_for(3600)
        await taken.wait()

    slow.apply = apply  # type: ignore[method-assign]
    publishing = asyncio.create_task(WeightSynchronizer([slow], limit_seconds=20).publish(published(1)))
    await asyncio.sleep(0.02)
    assert not publishing.done()
    taken.set()
    assert (await publishing).failed == {}


async def test_receivers_prepare_while_they_serve() -> None:
    serving: list[bool] = []
    clock = [0.0]

    class Watching(Receiver):
        async def prepare(self, publication: WeightPublication) -> None:
            serving.append(self.serving)
            clock[0] += 5
            await super().prepare(publication)

        async def apply(self, publication: WeightPublication) -> None:
            clock[0] += 0.25
            await super().apply(publication)

    report = await WeightSynchronizer([Watching("a"), Watching("b")], clock=lambda: clock[0]).publish(published(1))
    assert serving == [True, True]
    assert (report.prepare_seconds, report.pause_seconds) == (10, 0.5), "only the pause is exposed"
    assert report.transports == {"a": Transport.IN_PROCESS, "b": Transport.IN_PROCESS}


@pytest.mark.parametrize("kind", [Receiver, Stuck])
async def test_one_that_cannot_prepare_stops_serving_before_the_others_change_version(kind: type[Receiver]) -> None:
    log: list[str] = []

    class Told(Receiver):
        async def pause(self) -> None:
            log.append("good pauses" if bad.serving else "good pauses, bad is paused")
            await super().pause()

    bad = kind("bad", fails=True, fails_in="prepare")
    good = Told("good")
    async with asyncio.timeout(60):
        report = await WeightSynchronizer([bad, good], limit_seconds=0.2).publish(published(1))
    assert log == ["good pauses, bad is paused"]
    assert report.failed.keys() == {"bad"}
    assert (bad.serving, good.serving, good.version) == (False, True, 1)
    if isinstance(bad, Stuck):
        bad.go.set()


async def test_a_named_receiver_is_refreshed_while_the_others_serve() -> None:
    a, b = Receiver("a"), Receiver("b", fails=True)
    synchronizer = WeightSynchronizer([a, b])
    await synchronizer.publish(published(1))
    a.calls.clear()
    b.fails = False
    report = await synchronizer.publish(published(1), receivers=["b"])
    assert (report.failed, a.calls) == ({}, [])
    assert (b.serving, b.version) == (True, 1)
    assert synchronizer.sites(["b"]) == [site_of()]
    with pytest.raises(WeightSyncError, match="c: there is no engine of this name"):
        await synchronizer.publish(published(1), receivers=["c"])


@pytest.mark.parametrize("version", [1, 3])
async def test_nobody_is_brought_to_another_version_than_the_others_serve(version: int) -> None:
    a, b = Receiver("a"), Receiver("b")
    synchronizer = WeightSynchronizer([a, b])
    await synchronizer.publish(published(2))
    b.calls.clear()
    with pytest.raises(WeightSyncError, match=rf"version {version} for b alone would be a mix: a version 2"):
        await synchronizer.publish(published(version), receivers=["b"])
    assert (b.calls, b.serving, b.version) == ([], True, 2)


async def test_a_refresh_that_comes_behind_a_newer_version_is_refused() -> None:
    """It was asked for while the others served 1; by its turn they serve 2."""
    a, b = Receiver("a"), Receiver("b")
    synchronizer = WeightSynchronizer([a, b])
    await synchronizer.publish(published(1))
    everybody = asyncio.create_task(synchronizer.publish(published(2)))
    alone = asyncio.create_task(synchronizer.publish(published(1), receivers=["b"]))
    assert (await everybody).failed == {}
    with pytest.raises(WeightSyncError, match="would be a mix"):
        await alone
    assert (a.version, b.version) == (2, 2)


async def test_receivers_may_come_and_go() -> None:
    there = [Receiver("a"), Receiver("b")]
    synchronizer = WeightSynchronizer(lambda: there)
    await synchronizer.publish(published(1))
    there[:] = [there[1], Receiver("c")]
    await synchronizer.publish(published(2), receivers=["b", "c"])
    assert [receiver.version for receiver in there] == [2, 2], "one that is gone does not count as serving"


@pytest.mark.parametrize("stuck_in", ["prepare", "pause", "apply", "resume"])
async def test_a_publication_is_released_when_the_last_receiver_has_answered_or_failed(stuck_in: str) -> None:
    released: list[tuple[int, bool]] = []

    async def release(publication: WeightPublication, *, still_read: bool) -> None:
        released.append((publication.version, still_read))

    good, stuck = Receiver("good"), Stuck("stuck", fails=True, fails_in=stuck_in)
    synchronizer = WeightSynchronizer([good, stuck], limit_seconds=0.2, release=release)
    async with asyncio.timeout(60):
        await synchronizer.publish(published(1))
        assert released == [(1, True)], "the stuck one may still be reading it"
        stuck.fails = False
        stuck.go.set()
        await asyncio.gather(*synchronizer._calls.late.values(), *synchronizer._releasing)
        assert released == [(1, True), (1, False)], "it has answered"
        await synchronizer.publish(published(2))
    assert released == [(1, True), (1, False), (2, False)]


async def test_memory_of_a_receiver_that_never_answers_is_freed_after_the_limit_and_later_versions_at_once() -> None:
    released: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

    async def release(publication: WeightPublication, *, still_read: bool) -> None:
        released.put_nowait((publication.version, still_read))

    good, stuck = Receiver("good"), Stuck("stuck", fails=True, fails_in="prepare")
    synchronizer = WeightSynchronizer([good, stuck], limit_seconds=0.2, release=release)
    async with asyncio.timeout(60):
        await synchronizer.publish(published(1))
        await synchronizer.publish(published(2))
        found = [await released.get() for _ in range(3)]
    assert found[0] == (1, True)
    assert sorted(found[1:]) == [(1, False), (2, False)], "the stuck one was not asked to read version 2"
    stuck.go.set()


@pytest.mark.parametrize("stuck_in", ["prepare", "pause", "apply", "resume"])
async def test_a_sync_that_is_cancelled_twice_says_that_its_publication_is_still_read(stuck_in: str) -> None:
    released: asyncio.Queue[bool] = asyncio.Queue()

    async def release(publication: WeightPublication, *, still_read: bool) -> None:
        released.put_nowait(still_read)

    stuck = Stuck("stuck", fails=True, fails_in=stuck_in)
    synchronizer = WeightSynchronizer([stuck], limit_seconds=600.0, release=release)
    task = asyncio.create_task(synchronizer.publish(published(1)))
    while stuck_in not in stuck.calls:  # noqa: ASYNC110 - the receiver is looked at, not told to signal
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await released.get() is True
        stuck.fails = False
        stuck.go.set()
        await asyncio.gather(*synchronizer._calls.late.values())
        assert await released.get() is False, "it has answered"
        assert not stuck.serving
        await synchronizer.publish(published(2))
        assert (stuck.version, await released.get()) == (2, False)


async def test_a_publication_that_nobody_could_take_is_released_too() -> None:
    released: list[int] = []

    async def release(publication: WeightPublication, *, still_read: bool) -> None:
        released.append(publication.version)

    with pytest.raises(WeightSyncError):
        await WeightSynchronizer([Receiver("a", fails=True)], release=release).publish(published(1))
    assert released == [1]


async def test_a_receiver_that_cannot_reach_the_weights_stays_out_and_is_told_why() -> None:
    class Elsewhere(Receiver):
        @property
        def site(self) -> WeightSite:
            return WeightSite("another machine", 1)

    near, far = Receiver("near"), Elsewhere("far")
    report = await WeightSynchronizer([near, far]).publish(published(1))
    assert "lives in process 1 on another machine (cpu)" in report.failed["far"]
    assert (near.serving, near.version, far.serving) == (True, 1, False)

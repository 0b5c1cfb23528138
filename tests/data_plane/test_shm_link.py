"""Clients of other processes and the connection they have to the owner."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from typing import Any, cast

import pytest

from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.opening import connect
from penstock.data_plane.store.messages import WhenFull
from penstock.errors import DataPlaneError, DataPlaneLost
from penstock.runtime.wire import framing
from tests.data_plane.support import LARGE, MB, meta_of
from tests.data_plane.test_shm_capacity import LONG, row
from tests.data_plane.test_shm_capacity import owner as owner


def test_a_view_outlives_a_message_that_could_not_be_sent() -> None:
    """The owner stands still for a while: the client cannot use it any more, and still reads what it has."""
    owner = ShmOwner(10 * MB, WhenFull.REFUSE)
    owner.register_partition("p", LARGE)
    owner.put_samples(["a"], row(8, 7), "p")
    reader = connect(owner.address())
    link = cast("Any", reader)._link
    view = reader.get_samples(meta_of("p", "a"), ["big"]).tensor("big")
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
    goes_on = threading.Event()
    assert owner._server is not None
    owner._server._loop.call_soon_threadsafe(goes_on.wait, LONG)
    with pytest.raises(DataPlaneLost):
        reader.begin_claim("x" * 10 * MB, "task", ["big"], 1).future.result(LONG)
    goes_on.set()
    other = connect(owner.address())
    for _ in range(10):  # by then the owner has heard whatever there is to hear
        assert other.count_samples("p") == 1
    other.close()
    owner.clear_samples(["a"], "p")
    with pytest.raises(DataPlaneError, match="is full"):
        owner.put_samples(["b"], row(8, 1), "p")
    assert bool((view == 7).all())
    del view
    while owner.store.used:
        gc.collect()
        threading.Event().wait(0.005)
    owner.put_samples(["b"], row(8, 1), "p")
    owner.close()


async def test_no_message_is_sent_from_the_event_loop(owner: ShmOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    senders: set[threading.Thread] = set()
    real = framing.send_message

    def noted(*args: Any) -> None:
        senders.add(threading.current_thread())
        real(*args)

    monkeypatch.setattr(framing, "send_message", noted)
    remote = connect(owner.address())
    await remote.put_samples_async(["a"], row(1), "p")
    assert len(await remote.claim_meta_async("p", "task", ["big"], 1, LONG)) == 1
    with pytest.raises(DataPlaneError, match="0 of 1 rows"):
        await remote.claim_meta_async("p", "task", ["big"], 1, 0)
    assert senders
    assert threading.current_thread() not in senders
    remote.close()

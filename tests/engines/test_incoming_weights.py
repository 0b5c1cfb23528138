"""Published weights on their way into an engine: what nobody takes is let go of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.errors import EngineError
from penstock.rollout.engines.embedded import incoming as module
from penstock.rollout.engines.embedded.incoming import IncomingWeights
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import WeightPublication
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of
from penstock.weights.transports.base import OpenWeights
from penstock.weights.transports.opening import fetch_weights
from tests.support.tiny_models import tiny_model

ELSEWHERE = replace(site_of(), process=site_of().process + 1)


class Fetching:
    """Fetches for real, but only hands over when told to, and notes what is closed."""

    def __init__(self) -> None:
        self.fetched, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> OpenWeights:
        weights = fetch_weights(*args)
        close = weights.close

        def closing() -> None:
            close()
            self.closed.set()

        weights.close = closing  # type: ignore[method-assign]
        self.fetched.set()
        assert self.go.wait(60)
        return weights


@pytest.fixture
def fetching(monkeypatch: pytest.MonkeyPatch) -> Fetching:
    fetching = Fetching()
    monkeypatch.setattr(module, "fetch_weights", fetching)
    return fetching


@pytest.fixture
def publication() -> Iterator[WeightPublication]:
    publisher = WeightPublisher()
    yield publisher.publish(1, PolicyWeights.of(tiny_model()), [ELSEWHERE])
    publisher.close()


def incoming_weights() -> IncomingWeights:
    incoming = IncomingWeights("embedded", tiny_model(), torch.device("cpu"))
    incoming.site = ELSEWHERE
    return incoming


async def test_a_cancelled_prepare_lets_go_of_what_it_fetched(
    fetching: Fetching, publication: WeightPublication
) -> None:
    preparing = asyncio.create_task(incoming_weights().prepare(publication))
    assert await asyncio.to_thread(fetching.fetched.wait, 60)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    fetching.go.set()
    assert await asyncio.to_thread(fetching.closed.wait, 60)


async def test_an_engine_that_is_closed_while_it_prepares_lets_go_of_what_it_fetched(
    fetching: Fetching, publication: WeightPublication
) -> None:
    incoming = incoming_weights()
    preparing = asyncio.create_task(incoming.prepare(publication))
    assert await asyncio.to_thread(fetching.fetched.wait, 60)
    incoming.close()
    fetching.go.set()
    with pytest.raises(EngineError, match="is closed"):
        await preparing
    assert await asyncio.to_thread(fetching.closed.wait, 60)


async def test_what_was_prepared_is_let_go_of_by_close(fetching: Fetching, publication: WeightPublication) -> None:
    fetching.go.set()
    incoming = incoming_weights()
    await incoming.prepare(publication)
    incoming.close()
    assert await asyncio.to_thread(fetching.closed.wait, 60)

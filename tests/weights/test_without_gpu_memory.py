"""Where memory of a GPU cannot be shared between processes, weights go through CPU memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.errors import WeightSyncError
from penstock.rollout.engines.embedded.incoming import IncomingWeights
from penstock.weights.hf import named_weights
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import CudaIpcEndpoint, SharedMemoryEndpoint, WeightPublication, WeightSite
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of
from penstock.weights.transports import cuda_driver
from penstock.weights.transports.cuda_driver import CudaIpcUnavailable
from tests.support.tiny_models import tiny_model
from tests.weights.test_publisher import memories, read

HERE = site_of()
ON_GPU = replace(HERE, device="GPU-1")
ENGINE = replace(ON_GPU, process=HERE.process + 1)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that refuses every piece of memory."""

    def refuse(*_: Any) -> Any:
        raise CudaIpcUnavailable("no room")

    monkeypatch.setattr(cuda_driver, "allocate", refuse)
    monkeypatch.setattr(cuda_driver, "open_handle", refuse)


def trainer_on_gpu(monkeypatch: pytest.MonkeyPatch) -> PolicyWeights:
    monkeypatch.setattr("penstock.weights.publisher.site_of", lambda device: ON_GPU)
    return PolicyWeights.given([("w", torch.arange(6.0))])


def test_a_trainer_without_room_on_its_gpu_publishes_through_cpu_memory(
    no_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, publisher = trainer_on_gpu(monkeypatch), WeightPublisher()
    before = memories()
    for version in range(3):
        publication = publisher.publish(version, weights, [ENGINE])
        assert [type(endpoint) for endpoint in publication.endpoints] == [SharedMemoryEndpoint]
        assert torch.equal(read(publication, ENGINE)["w"], torch.arange(6.0))
        publisher.release(publication)
        assert memories() == before + 1, "it is written again for the next version"
    publisher.close()
    assert memories() == before


def published_both_ways(model: Any, publisher: WeightPublisher) -> WeightPublication:
    """As for a receiver that is new: through the GPU, and through CPU memory in case that fails."""
    publication = publisher.publish(1, PolicyWeights.of(model), [replace(ENGINE, device="cpu")])
    handles = (bytes(cuda_driver.HANDLE_BYTES),) * len(publication.manifest.buckets)
    by_gpu = CudaIpcEndpoint(HERE.machine, HERE.process, "GPU-1", handles)
    return replace(publication, endpoints=(by_gpu, *publication.endpoints))


async def incoming(model: Any, publication: WeightPublication) -> tuple[IncomingWeights, WeightSite]:
    engine = IncomingWeights("embedded", model, torch.device("cpu"))
    engine.site = ENGINE
    await engine.prepare(publication)
    return engine, engine.site


async def test_a_receiver_that_cannot_open_memory_of_its_gpu_reads_cpu_memory_and_says_so(no_room: None) -> None:
    model, publisher = tiny_model(), WeightPublisher()
    publication = published_both_ways(model, publisher)
    engine, site = await incoming(tiny_model(seed=1), publication)
    assert site == replace(ENGINE, device="cpu")
    taken = engine.take(publication)
    for (_, found), (_, wanted) in zip(taken.tensors(), named_weights(model), strict=True):
        assert torch.equal(found, wanted)
    taken.close()
    publisher.close()


async def test_a_receiver_that_was_given_nothing_else_fails(no_room: None) -> None:
    publisher = WeightPublisher()
    publication = published_both_ways(tiny_model(), publisher)
    with pytest.raises(WeightSyncError, match="published through cuda_ipc"):
        await incoming(tiny_model(), replace(publication, endpoints=publication.endpoints[:1]))
    publisher.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_that_it_has_none() -> None:
    with pytest.raises(CudaIpcUnavailable):
        cuda_driver.allocate(torch.device("cuda"), 64)

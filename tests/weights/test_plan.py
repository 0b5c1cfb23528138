"""Who reads a publication how."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.memory import MemoryAddress
from penstock.weights.plan import Transport, can_read, sync_plan, transport_of, wanted_transports
from penstock.weights.publication import (
    CudaIpcEndpoint,
    Endpoint,
    InProcessEndpoint,
    SharedMemoryEndpoint,
    WeightSite,
)

SITES = st.builds(
    WeightSite, st.sampled_from(["m", "m", "other"]), st.integers(1, 4), st.sampled_from(["cpu", "GPU-a", "GPU-b"])
)
RECEIVERS = st.dictionaries(st.sampled_from([f"embedded-{i}" for i in range(6)]), SITES)


def published(trainer: WeightSite, transports: frozenset[Transport]) -> list[Endpoint]:
    """What a trainer at a site publishes through."""
    every: dict[Transport, Endpoint] = {
        Transport.SHARED_MEMORY: SharedMemoryEndpoint(trainer.machine, MemoryAddress(trainer.process, 3, 1, 1)),
        Transport.CUDA_IPC: CudaIpcEndpoint(trainer.machine, trainer.process, trainer.device, (b"handle",)),
        Transport.IN_PROCESS: InProcessEndpoint(trainer.machine, trainer.process, 1),
    }
    if trainer.device == "cpu":
        del every[Transport.CUDA_IPC]
    return [endpoint for transport, endpoint in every.items() if transport in transports]


@given(SITES, RECEIVERS)
def test_everybody_on_the_trainers_machine_is_reached_by_what_was_published_for_them(
    trainer: WeightSite, receivers: dict[str, WeightSite]
) -> None:
    wanted = wanted_transports(trainer, receivers.values())
    plan = sync_plan(receivers, published(trainer, wanted))
    assert plan.routes.keys() | plan.unreachable.keys() == receivers.keys()
    assert plan.routes.keys() == {name for name, site in receivers.items() if site.machine == trainer.machine}
    assert {transport_of(endpoint) for endpoint in plan.routes.values()} == wanted, "nothing is published for nobody"
    assert all(can_read(receivers[name], endpoint) for name, endpoint in plan.routes.items())


@given(SITES, RECEIVERS, st.permutations(list(Transport)))
def test_the_best_way_is_taken_whatever_else_is_offered(
    trainer: WeightSite, receivers: dict[str, WeightSite], order: list[Transport]
) -> None:
    everything = published(trainer, frozenset(Transport))
    everything.sort(key=lambda endpoint: order.index(transport_of(endpoint)))
    for name, endpoint in sync_plan(receivers, everything).routes.items():
        site = receivers[name]
        if site.process == trainer.process:
            assert transport_of(endpoint) is Transport.IN_PROCESS
        elif site.device == trainer.device != "cpu":
            assert transport_of(endpoint) is Transport.CUDA_IPC
        else:
            assert transport_of(endpoint) is Transport.SHARED_MEMORY


def test_a_receiver_that_cannot_be_reached_is_told_why() -> None:
    trainer, engine = WeightSite("m", 1), WeightSite("m", 2)
    plan = sync_plan({"embedded-0": engine}, published(trainer, frozenset({Transport.IN_PROCESS})))
    assert "process 2 on m (cpu)" in plan.unreachable["embedded-0"]
    assert "published through in_process" in plan.unreachable["embedded-0"]

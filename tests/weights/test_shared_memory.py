"""Weights through shared memory."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.runtime.memory import SharedMemory
from penstock.weights.shared_memory import read_weights, write_weights
from penstock.weights.source import WeightSource

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def source_of(tensors: dict[str, Tensor], version: int = 0) -> WeightSource:
    return WeightSource(version, lambda: iter(tensors.items()))


def other_side(memory: SharedMemory) -> SharedMemory:
    """The same memory as another process has it: by a descriptor of its own."""
    return SharedMemory(os.dup(memory.fd))


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first example may set up a GPU
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_read_is_what_was_written(kinds: list[tuple[torch.dtype, list[int], bool]]) -> None:
    torch.manual_seed(len(kinds))
    tensors = {
        f"w{i}": (torch.randn(shape).mT if strided and len(shape) > 1 else torch.randn(shape)).to(dtype)
        for i, (dtype, shape, strided) in enumerate(kinds)
    }
    memory = SharedMemory.create()
    reader = other_side(memory)
    try:
        found = read_weights(reader, write_weights(memory, source_of(tensors)), version=3)
        assert found.version == 3
        read = dict(found.tensors())
        assert list(read) == list(tensors)
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        assert all(read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    finally:
        memory.close()
        reader.close()


def test_it_grows_with_the_weights_and_old_views_stay_valid() -> None:
    memory = SharedMemory.create()
    reader = other_side(memory)
    small, large = {"w": torch.arange(8.0)}, {"w": torch.arange(8.0), "v": torch.ones(1_000_000)}
    old = dict(read_weights(reader, write_weights(memory, source_of(small)), 0).tensors())
    new = dict(read_weights(reader, write_weights(memory, source_of(large)), 1).tensors())
    assert torch.equal(old["w"], small["w"])
    assert torch.equal(new["v"], large["v"])
    memory.close()
    reader.close()
    memory.close()


def test_closing_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory.create()
    write_weights(memory, source_of({"w": torch.ones(3)}))
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_number_format_that_cannot_cross_is_named() -> None:
    memory = SharedMemory.create()
    with pytest.raises(WeightSyncError, match="w is of complex64"):
        write_weights(memory, source_of({"w": torch.ones(3, dtype=torch.complex64)}))
    memory.close()

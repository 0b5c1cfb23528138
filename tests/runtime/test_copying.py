"""Copies in CPU memory are exact, however they are cut and spread over threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.runtime import copying
from penstock.runtime.copying import TensorCopies, bytes_of, copy_all

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of many cores, on which 64 bytes are worth a thread."""
    monkeypatch.setattr(copying, "SMALLEST_PORTION", 64)
    monkeypatch.setattr(copying, "_LARGEST_PORTION", 256)
    monkeypatch.setattr(copying, "_threads", lambda: 8)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_bytes_of_any_size_and_offset_arrive_and_nothing_else_is_written(
    small_portions: None, sizes: list[tuple[int, int, int]]
) -> None:
    rng = np.random.default_rng(len(sizes))
    pairs, targets, expected = [], [], []
    for size, at, gap in sizes:
        source = rng.integers(0, 256, at + size, dtype=np.uint8)[at:]
        whole = np.full(at + size + gap, 7, dtype=np.uint8)
        pairs.append((whole[at : at + size], source))
        targets.append(whole)
        expected.append(np.concatenate([np.full(at, 7, np.uint8), source, np.full(gap, 7, np.uint8)]))
    copy_all(pairs)
    for target, wanted in zip(targets, expected, strict=True):
        assert np.array_equal(target, wanted)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from(["plain", "transposed", "sliced"]),
        ),
        max_size=8,
    ),
    st.integers(0, 2000),
)
def test_tensors_of_any_dtype_and_layout_become_what_torch_makes_of_them(
    small_portions: None, kinds: list[tuple[torch.dtype, torch.dtype, list[int], str]], most: int
) -> None:
    torch.manual_seed(len(kinds))
    copies, pairs = TensorCopies(most), []
    for to, dtype, shape, layout in kinds:
        whole = (torch.randn(shape) * 3).to(dtype)
        source = whole.mT if layout == "transposed" and len(shape) > 1 else whole
        source = whole[::2] if layout == "sliced" and shape else source
        target = torch.zeros(source.shape, dtype=to)
        pairs.append((target, torch.zeros(source.shape, dtype=to).copy_(source)))
        copies.add(target, source)
    copies.finish()
    for target, wanted in pairs:
        assert torch.equal(target, wanted)


def test_large_copies_are_shared_out_in_even_portions() -> None:
    one = np.zeros(1 << 20, np.uint8)
    tiny = np.zeros(1 << 10, np.uint8)
    pairs = [(one, one), (tiny, tiny)] * 256
    size = copying._portion_size(sum(len(source) for _, source in pairs), 16)
    portions = list(copying._portions(pairs, size))
    sizes = [sum(len(source) for _, source in portion) for portion in portions]
    assert len(sizes) >= 3 * 16
    assert set(sizes[:-1]) == {size}
    assert sum(sizes) == 256 * (len(one) + len(tiny))
    assert copying._portion_size(9 << 20, 16) == copying.SMALLEST_PORTION


@pytest.mark.parametrize(
    ("cores", "idle", "threads"),
    [(1, 0, 1), (2, 0, 1), (2, 1, 2), (16, 0, 8), (16, 3, 8), (16, 11, 12), (16, 90, 16), (64, 64, 16)],
)
def test_half_of_the_cores_copy_and_those_that_are_idle(
    cores: int, idle: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(copying, "idle_cores", lambda: idle)
    assert copying._threads() == threads


def test_copies_that_are_not_worth_a_thread_are_made_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_threads", lambda: pytest.fail("several threads were asked for"))
    target, source = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
    copy_all([(target, source)])
    assert target.all()


def test_several_threads_copy_at_the_same_time(small_portions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = threading.Barrier(4)

    def wait_for_others(target: object, source: object) -> None:
        everybody.wait(60)

    monkeypatch.setattr(copying.np, "copyto", wait_for_others)
    block = np.zeros(256, np.uint8)
    copy_all([(block, block)])  # four portions: each waits until all have begun


def test_the_caller_does_not_wait_for_helpers_that_have_not_begun(
    small_portions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = copying.DaemonExecutor(1)
    held = threading.Event()
    pool.submit(held.wait)
    monkeypatch.setattr(copying, "_helpers", pool)
    target, source = np.zeros(1000, np.uint8), np.arange(1000).astype(np.uint8)
    copy_all([(target, source)])
    assert np.array_equal(target, source)
    held.set()
    pool.shutdown()


def test_what_fails_in_a_helper_is_raised(small_portions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.get_ident()
    begun = threading.Event()

    def fail(target: object, source: object) -> None:
        if threading.get_ident() != caller:
            begun.set()
            raise OSError("no memory")
        assert begun.wait(60)

    monkeypatch.setattr(copying.np, "copyto", fail)
    block = np.zeros(1000, np.uint8)
    with pytest.raises(OSError, match="no memory"):
        copy_all([(block, block)])


def test_a_single_byte_is_not_spread_over_a_larger_target() -> None:
    with pytest.raises(ValueError, match="1 bytes do not fill 4"):
        copy_all([(np.zeros(4, np.uint8), np.ones(1, np.uint8))])


def test_copies_wait_until_there_are_enough_of_them() -> None:
    copies, targets = TensorCopies(most=16), [torch.zeros(2) for _ in range(3)]
    for target in targets[:2]:
        copies.add(target, torch.ones(2))
    assert [float(target.sum()) for target in targets] == [0, 0, 0]
    copies.add(targets[2], torch.ones(2))
    assert [float(target.sum()) for target in targets] == [2, 2, 2]


def test_bytes_are_those_of_the_tensor_itself() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    content = bytes_of(tensor)
    assert content is not None
    content[:] = 0
    assert tensor.tolist() == [0.0, 0.0]
    assert bytes_of(torch.ones(2, 2).mT) is None
    assert bytes_of(torch.ones(2, dtype=torch.complex64).conj()) is None

"""The few calls of the CUDA driver that memory between processes needs; torch has no public ones.

Only machines with a GPU ever load the driver. Handles are plain bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_PEER_ACCESS = 1
"""Lets the handle also be opened from another GPU's context, where the hardware can."""
_OUT_OF_MEMORY = 2


class CudaIpcUnavailable(Exception):
    """Memory of the GPU cannot be shared between processes here, or there is no room for it."""


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * HANDLE_BYTES),)


def allocate(device: torch.device, size: int) -> int:
    """Memory of its own, as torch's allocator may hand out parts of a larger piece; returns its address."""
    address = ctypes.c_uint64()
    with _context(device):
        status = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        if status == _OUT_OF_MEMORY:  # torch may hold what it does not use
            torch.cuda.empty_cache()
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        _check(status, f"{size:,} bytes could not be allocated")
    return address.value


def free(device: torch.device, address: int) -> None:
    """Free what `allocate` gave."""
    with _context(device):
        _check(_driver().cuMemFree_v2(ctypes.c_uint64(address)), "memory could not be freed")


def export_handle(device: torch.device, address: int) -> bytes:
    """What another process opens the memory with."""
    handle = _Handle()
    with _context(device):
        _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "memory cannot be exported")
    return bytes(handle.content)


def open_handle(device: torch.device, content: bytes) -> int:
    """Another process's memory, at an address of this one."""
    if len(content) != HANDLE_BYTES:
        raise CudaIpcUnavailable(f"a handle has {HANDLE_BYTES} bytes, not {len(content)}")
    handle, address = _Handle.from_buffer_copy(content), ctypes.c_uint64()
    with _context(device):
        status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(_PEER_ACCESS))
        _check(status, "another process's memory cannot be opened")
    return address.value


def close_handle(device: torch.device, address: int) -> None:
    """Let go of what `open_handle` gave."""
    with _context(device):
        _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "another process's memory cannot be closed")


def bytes_at(device: torch.device, address: int, size: int) -> Tensor:
    """The memory as a tensor of bytes, which does not own it."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Bytes(address, size), device=device)


class _Bytes:
    """Memory as torch takes it over without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaIpcUnavailable(f"the CUDA driver cannot be loaded: {error}") from error


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """The context that torch uses, current in this thread."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        ordinal = torch.cuda.current_device() if device.index is None else device.index
    except (AssertionError, RuntimeError) as error:  # torch was built without CUDA, or sees no GPU
        raise CudaIpcUnavailable(str(error)) from error
    driver, number, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "the CUDA driver cannot be initialised")
    _check(driver.cuDeviceGet(ctypes.byref(number), ctypes.c_int(ordinal)), f"there is no GPU {ordinal}")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "the GPU's context cannot be taken")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), "the GPU's context cannot be taken")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(number)


def _check(status: int, what: str) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        raise CudaIpcUnavailable(f"{what}: {(name.value or b'unknown error').decode()} ({status})")

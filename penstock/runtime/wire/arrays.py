"""Arrays, tensors on the CPU and numpy's scalars: a dtype and a shape in the head, the elements in the body.

Imported with the first of them, so that whoever sends none starts without numpy and torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import WireError
from penstock.runtime.wire import tags
from penstock.runtime.wire.encoder import Encoder
from penstock.runtime.wire.objects import Writer

if TYPE_CHECKING:
    import torch

_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQefdFD"}
"""Numbers and truth values, in this machine's byte order."""
_MOST_AXES = 32
Take = Callable[[int], memoryview]
"""Hands out the next bytes of the body."""


def writer_of(kind: type) -> Writer | None:
    """How a class of numpy's or torch's is written; None if it is neither array nor tensor nor scalar."""
    if issubclass(kind, np.ndarray):
        return _array
    if issubclass(kind, np.generic):
        return _scalar
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor
    return _shape if torch is not None and kind is torch.Size else None


def _array(encoder: Encoder, value: np.ndarray[Any, Any], tag: int = tags.ARRAY) -> None:
    native = value.dtype.newbyteorder("=")
    if native.str not in _DTYPES:
        raise WireError(f"an array of dtype {value.dtype} cannot cross between processes")
    encoder.out.append(tag)
    encoder.write_all((native.str, value.shape))
    if value.size:
        encoder.write_buffer(np.ascontiguousarray(value, native).reshape(-1).view(np.uint8).data)


def _scalar(encoder: Encoder, value: np.generic) -> None:
    if isinstance(value, np.number | np.bool_):
        _array(encoder, np.asarray(value), tags.SCALAR)
    else:
        encoder.write(value.item())  # numpy's own kinds of text and bytes


def _shape(encoder: Encoder, value: tuple[int, ...]) -> None:
    encoder.write(tuple(value))


def _tensor(encoder: Encoder, value: torch.Tensor) -> None:
    import torch

    if value.device.type != "cpu":
        raise WireError(f"a tensor on {value.device} cannot cross between processes: send a copy on the CPU")
    name = _name_of(value.dtype)
    if value.layout is not torch.strided or value.is_quantized or name not in _torch_dtypes():
        raise WireError(f"a tensor of {value.dtype} and {value.layout} cannot cross between processes")
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    encoder.out.append(tags.TENSOR)
    encoder.write_all((name, tuple(plain.shape)))
    if plain.numel():
        # Not `reshape`: a tensor with one element counts as contiguous whatever its strides are, and would keep them.
        flat = plain.as_strided((plain.numel(),), (1,))
        encoder.write_buffer(flat.view(torch.uint8).numpy().data)


def read_array(dtype: Any, shape: Any, take: Take) -> np.ndarray[Any, Any]:
    """An array over the next bytes of the body."""
    kind = _DTYPES[dtype]
    size = _size(shape, kind.itemsize)
    return np.frombuffer(take(size), kind).reshape(shape) if size else np.empty(shape, kind)


def read_scalar(dtype: Any, shape: Any, take: Take) -> Any:
    """A scalar of numpy's."""
    return read_array(dtype, shape, take)[()]


def read_tensor(dtype: Any, shape: Any, take: Take) -> torch.Tensor:
    """A tensor over the next bytes of the body."""
    import torch

    kind = _torch_dtypes()[dtype]
    size = _size(shape, kind.itemsize)
    if not size:
        return torch.empty(shape, dtype=kind)
    raw = take(size)
    if raw.readonly:
        raw = memoryview(bytearray(raw))
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).view(shape)


def _size(shape: Any, itemsize: int) -> int:
    """Bytes of an array."""
    if not isinstance(shape, tuple) or len(shape) > _MOST_AXES:
        raise WireError("an array's shape is none")
    if not all(type(axis) is int and 0 <= axis < 1 << 48 for axis in shape):
        raise WireError("an array's shape has an axis of an impossible length")
    return math.prod(shape) * itemsize


_known: dict[str, Any] = {}


def _torch_dtypes() -> dict[str, torch.dtype]:
    if not _known:
        import torch

        found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        quantized = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
        _known.update({_name_of(dtype): dtype for dtype in found - quantized})
    return _known


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What safetensors files say about their tensors, from their headers alone: names, shapes, dtypes; needs no torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import SetupError
from penstock.weights.model_files import text_settings

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit that the format itself sets."""
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of the format, and what torch calls them; others keep their name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, not read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Of its bytes in the file."""
    end: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder by its name, in the order of the files; a folder has one file or an index.

    Files are chosen as `transformers` chooses them. Raises `SetupError` if one is missing or torn.
    """
    named = text_settings(folder).get("transformers_weights") or WEIGHTS
    if not (folder / named).is_file() and (folder / INDEX).is_file():
        named = INDEX
    files = [folder / named]
    if named.endswith(".json"):
        files = [folder / name for name in dict.fromkeys(_shards(folder / named))]
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= {tensor.name: tensor for tensor in file_tensors(file)}
    return found


def file_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of one file, in the order of their bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes, and the file has {size}")
            header = json.loads(opened.read(length))
        return sorted(_tensors(header, file, 8 + length, size), key=lambda tensor: tensor.begin)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise SetupError(f"model.path: {str(file)!r} is not a whole safetensors file: {error}") from error


def same_bytes(one: StoredTensor, other: StoredTensor, chunk: int = 2**20) -> bool:
    """Whether two tensors have the same dtype, shape and content, compared piece by piece."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left > 0:
            size = min(chunk, left)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _tensors(header: Mapping[str, Any], file: Path, base: int, size: int) -> list[StoredTensor]:
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - base:
            raise ValueError(f"{name} would end after the end of the file")
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        found.append(StoredTensor(name, dtype, tuple(map(int, entry["shape"])), file, base + begin, base + end))
    return found


def _shards(index: Path) -> list[str]:
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        return sorted(map(str, named.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SetupError(f"model.path: {str(index)!r} does not name the files of the weights: {error}") from error

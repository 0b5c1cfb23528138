"""Rows on disk: tensors as safetensors, everything else as JSON; nothing is pickled.

A folder of an archive holds `rows.safetensors`, with `field/values` and `field/offsets` of per-token columns and
`field/tensor` of fixed-shape ones, and `rows.json`, with the sample ids and the non-tensor columns. Complex numbers are
pairs of numbers, and `/complex` follows their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.errors import DataPlaneError

_TENSORS, _REST = "rows.safetensors", "rows.json"
_COMPLEX = "/complex"


def save_rows(folder: Path, batch: SampleBatch) -> None:
    """Write rows into an existing folder.

    Raises `OSError` if the disk refuses, and `DataPlaneError` if an object in a row cannot be written as JSON.
    """
    tensors: dict[str, Tensor] = {}
    objects: dict[str, list[Any]] = {}
    for name, column in batch.columns.items():
        if isinstance(column, JaggedColumn):
            tensors[f"{name}/values"], tensors[f"{name}/offsets"] = column.values, column.offsets_R1
        elif isinstance(column, Tensor):
            tensors[f"{name}/tensor"] = column
        else:
            objects[name] = list(column.items)
    try:
        rest = json.dumps({"sample_ids": batch.sample_ids, "objects": objects})
    except (TypeError, ValueError) as error:
        raise DataPlaneError(
            f"rows cannot be saved: {', '.join(objects)} must be text or JSON-like: {error}"
        ) from error
    # Written from here, not by safetensors, whose own error for a full disk is not an OSError.
    content = save(dict(_storable(name, tensor) for name, tensor in tensors.items()))
    (folder / _TENSORS).write_bytes(content)
    (folder / _REST).write_text(rest, encoding="utf-8")


def _storable(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A tensor and its key in the file; safetensors does not know all complex dtypes."""
    own = tensor.detach().cpu().contiguous().clone()
    return (f"{key}{_COMPLEX}", torch.view_as_real(own)) if own.is_complex() else (key, own)


def _as_stored(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    """What `_storable` was given."""
    if not key.endswith(_COMPLEX):
        return key, tensor
    try:
        return key.removesuffix(_COMPLEX), torch.view_as_complex(tensor)
    except RuntimeError as error:
        raise ValueError(f"{key} has no pairs of numbers") from error


def load_rows(folder: Path) -> SampleBatch:
    """What `save_rows` wrote; `DataPlaneError` names the folder whose rows cannot be used, and why."""
    try:
        tensors: dict[str, Tensor] = load_file(folder / _TENSORS)
        rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
        sample_ids, objects = tuple(rest["sample_ids"]), dict(rest["objects"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataPlaneError(f"the rows in {str(folder)!r} cannot be read: {error}") from error
    columns: dict[str, Column] = {name: ObjectColumn(tuple(items)) for name, items in objects.items()}
    try:
        columns |= _tensor_columns(dict(_as_stored(*each) for each in tensors.items()))
    except ValueError as error:
        raise DataPlaneError(f"the rows in {str(folder)!r} are damaged: {error}") from error
    wrong = [name for name, column in columns.items() if len(column) != len(sample_ids)]
    if wrong:
        raise DataPlaneError(f"the rows in {str(folder)!r} are damaged: {', '.join(wrong)} differ in number")
    return SampleBatch(sample_ids, columns)


def _tensor_columns(tensors: Mapping[str, Tensor]) -> dict[str, Column]:
    """The columns; `ValueError` names one that is not whole."""
    columns: dict[str, Column] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        if tensor.dim() == 0:
            raise ValueError(f"{key} has no rows")
        if part == "tensor":
            columns[name] = tensor
        elif part == "values":
            columns[name] = JaggedColumn(tensor, _checked_offsets(name, tensors.get(f"{name}/offsets"), len(tensor)))
    return columns


def _checked_offsets(name: str, offsets_R1: Tensor | None, total: int) -> Tensor:
    if offsets_R1 is None or offsets_R1.dim() != 1 or offsets_R1.dtype != torch.int64 or not len(offsets_R1):
        raise ValueError(f"{name} does not say where its rows begin")
    if offsets_R1[0] != 0 or offsets_R1[-1] != total or bool((offsets_R1.diff() < 0).any()):
        raise ValueError(f"the rows of {name} do not begin where it says")
    return offsets_R1

"""From what an environment says about a sample to the columns of its own that it declares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.plain import problem_with
from penstock.data_plane.schema import spec_of
from penstock.errors import WrongColumn
from penstock.rollout.environments.base import Trajectory
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.text import cut, safe


def with_columns(trajectory: Trajectory, declared: Sequence[ExtraColumn], environment: str, sample: str) -> Trajectory:
    """The trajectory with a tensor or an object for every declared column, and with those that are metrics measured.

    `WrongColumn` names environment, column and sample if a value is missing, not declared, or of another form.

    Example: with `ExtraColumn("hints", "fixed", "int64", metric="sum")`, `columns={"hints": 3}` becomes a tensor, and
    `hints` 3.0 one of the metrics.
    """
    where = f"{environment}: sample {sample}"
    given: object = trajectory.columns
    if not isinstance(given, Mapping):
        raise WrongColumn(
            f"{where}: its columns are {type(given).__name__}, not a mapping from names to values",
            "its columns are not a mapping",
        )
    unknown = sorted(set(trajectory.columns) - {column.name for column in declared}, key=str)
    if unknown:
        raise WrongColumn(
            f"{where} has the column {unknown[0]!r}, which the environment does not declare; add it to extra_columns",
            f"the column {unknown[0]!r} is not declared",
        )
    if not declared:
        return trajectory
    columns: dict[str, Any] = {}
    metrics = dict(trajectory.metrics)
    for column in declared:
        is_there = column.name in trajectory.columns
        if is_there:
            columns[column.name] = _checked(trajectory.columns[column.name], column, trajectory.row_length, where)
        elif column.optional:
            columns[column.name] = _filled(column, trajectory.row_length)
        else:
            raise WrongColumn(
                f"{where} has no value for the column {column.name!r} ({column}), which the environment declares; give "
                "one, or declare it with optional=True",
                f"the column {column.name!r} is missing",
            )
        if column.metric is not None and is_there:
            if column.name in metrics:
                raise WrongColumn(
                    f"{where} has {column.name!r} twice, as a metric and as a column that is one; rename one of them",
                    f"the column {column.name!r} is measured twice",
                )
            metrics[column.name] = _number(columns[column.name], column, where)
    return replace(trajectory, columns=columns, metrics=metrics)


def stacked(
    trajectories: Sequence[Trajectory], declared: Sequence[ExtraColumn], offsets_R1: Tensor
) -> dict[str, Column]:
    """The environment's own columns of a group, one row per trajectory; from what `with_columns` gives.

    Per-token columns share the `offsets_R1` of the group's tokens: where rows begin is stored and sent once.
    """
    found: dict[str, Column] = {}
    for column in declared:
        values = [trajectory.columns[column.name] for trajectory in trajectories]
        if column.kind == "object":
            found[column.name] = ObjectColumn(tuple(values))
        else:
            is_fixed = column.kind == "fixed"
            found[column.name] = torch.stack(values) if is_fixed else JaggedColumn(torch.cat(values), offsets_R1)
    return found


def problem_with_rows(columns: Mapping[str, Column], declared: Sequence[ExtraColumn], lengths: Sequence[int]) -> str:
    """What is wrong with stored rows of an environment's own columns; empty if nothing is."""
    for column in declared:
        stored = columns[column.name]
        if spec_of(column.name, stored) != column.spec:
            return f"{column.name} is {spec_of(column.name, stored)}, not {column}"
        if isinstance(stored, JaggedColumn) and stored.lengths_R.tolist() != list(lengths):
            return f"{column.name} is not as long as its rows"
        values = stored.values if isinstance(stored, JaggedColumn) else stored
        if isinstance(values, Tensor) and tuple(values.shape[1:]) != column.shape:
            return f"{column.name} has the shape {list(values.shape[1:])}, not {list(column.shape)}"
    return ""


def _checked(value: object, column: ExtraColumn, length: int, where: str) -> Any:
    """The value as its row holds it; always a copy, as the environment may use its own memory for the next sample."""
    if column.kind == "object":
        problem = problem_with(value)
        if problem is not None:
            raise _wrong(where, column, f"{problem}; text, None, and lists and dicts of JSON's types are allowed")
        return deepcopy(value)
    tensor = _as_tensor(value, column, where)
    shape = (length, *column.shape) if column.kind == "per_token" else column.shape
    if tuple(tensor.shape) != shape:
        row = f"; its row has {length} tokens, prompt included" if column.kind == "per_token" else ""
        raise _wrong(where, column, f"the shape {list(tensor.shape)}, not {list(shape)}{row}")
    return tensor


def _as_tensor(value: object, column: ExtraColumn, where: str) -> Tensor:
    """Arrays and tensors keep their dtype, which must be the declared one; plain numbers have none and get it."""
    dtype = getattr(torch, str(column.dtype))
    is_plain = not isinstance(value, Tensor | np.ndarray)
    try:
        tensor = _of_numbers(value) if is_plain else _copied(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise _wrong(where, column, f"{cut(safe(repr(value)), 100)}, which is not made of numbers") from None
    if tensor.dtype == dtype:
        return tensor
    if not is_plain:
        raise _wrong(where, column, f"the dtype {str(tensor.dtype).removeprefix('torch.')}")
    if not _can_hold(dtype, tensor):
        raise _wrong(where, column, f"{cut(safe(repr(value)), 100)}, which {column.dtype} cannot hold")
    return tensor.to(dtype)


def _can_hold(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Whether these numbers are the same with this dtype, but for their rounding."""
    if tensor.is_complex() and not dtype.is_complex:
        return False
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
    wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor.to(torch.float64)
    is_held = (wide.abs() <= torch.finfo(dtype).max) | wide.isnan()
    if dtype is not torch.float8_e4m3fn:  # which has no infinity
        is_held |= wide.isinf()
    return bool(is_held.all())


def _copied(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    return torch.from_numpy(np.array(value, order="C"))


def _of_numbers(value: Any) -> Tensor:
    """Plain numbers, with as much precision as Python has."""
    plain = value.item() if isinstance(value, np.generic) else value
    tensor = torch.tensor(plain)
    if tensor.is_complex():
        return torch.tensor(plain, dtype=torch.complex128)
    return torch.tensor(plain, dtype=torch.float64) if tensor.is_floating_point() else tensor


def _filled(column: ExtraColumn, length: int) -> Any:
    if column.kind == "object":
        return None
    shape = (length, *column.shape) if column.kind == "per_token" else column.shape
    return torch.full(shape, column.missing, dtype=torch.float64).to(getattr(torch, str(column.dtype)))


def _number(value: Tensor, column: ExtraColumn, where: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise _wrong(where, column, f"{number}; a metric must be a finite number")
    return number


def _wrong(where: str, column: ExtraColumn, got: str) -> WrongColumn:
    return WrongColumn(
        f"{where}: the column {column.name!r} is declared as {column}, but has {got}",
        f"the column {column.name!r} is not as declared",
    )

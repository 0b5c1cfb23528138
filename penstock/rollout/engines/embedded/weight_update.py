"""Taking over a source's weights: everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.errors import WeightSyncError
from penstock.weights.source import WeightSource

_SHOWN = 5
"""Mismatches that an error message names."""


def check_source(model: nn.Module, source: WeightSource) -> None:
    """Every parameter must be given, under any of its names, in its shape, and nothing else.

    Iterates over the source once; `copy_weights` iterates over a lazy source again, so no copy of the whole model is
    held in between.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    given: set[int] = set()
    problems: list[str] = []
    for name, tensor in source.tensors():
        target = targets.get(name)
        if target is None:
            problems.append(f"{name} is not a weight of the model")
        elif target.shape != tensor.shape:
            problems.append(f"{name} has shape {list(tensor.shape)} instead of {list(target.shape)}")
        if target is not None:
            given.add(id(target))
    problems += [f"{name} is missing" for name, target in model.named_parameters() if id(target) not in given]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightSyncError(
            f"weights of version {source.version} do not fit {type(model).__name__}; nothing was changed: "
            + "; ".join(problems[:_SHOWN])
            + more
        )


def copy_weights(model: nn.Module, source: WeightSource) -> None:
    """Overwrite the model's weights in place with those of a checked source."""
    targets = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in source.tensors():
            targets[name].copy_(tensor, non_blocking=False)


def free_weights(parameters: Iterable[nn.Parameter]) -> list[torch.Size]:
    """Free the weights' memory; returns the shapes that `restore_weights` needs."""
    shapes: list[torch.Size] = []
    with torch.inference_mode(False):
        for parameter in parameters:
            shapes.append(parameter.shape)
            parameter.data = _empty_like(parameter, torch.Size([0]))
    return shapes


def restore_weights(parameters: Iterable[nn.Parameter], shapes: Iterable[torch.Size]) -> None:
    """Take the memory again; its content is undefined until new weights are copied in."""
    with torch.inference_mode(False):
        for parameter, shape in zip(parameters, shapes, strict=True):
            parameter.data = _empty_like(parameter, shape)


def _empty_like(parameter: nn.Parameter, shape: torch.Size) -> Tensor:
    return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)

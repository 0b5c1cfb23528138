"""Taking over published weights: everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.errors import WeightSyncError
from penstock.runtime.copying import TensorCopies
from penstock.weights.publication import WeightPublication

_SHOWN = 5
"""Mismatches that an error message names."""


class WeightTargets:
    """What a model's weights are, for checks in any thread: it stays true while they are freed or updated."""

    def __init__(self, model: nn.Module) -> None:
        self._model_name = type(model).__name__
        named = list(model.named_parameters(remove_duplicate=False))
        self._shapes = {name: (id(parameter), parameter.shape, parameter.dtype) for name, parameter in named}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def check(self, publication: WeightPublication) -> None:
        """Every parameter must be given, under any of its names, in its shape, and nothing else.

        Weights of another floating-point dtype are converted as they are copied.
        """
        missing = dict(self._names)
        problems: list[str] = []
        for entry in publication.manifest.entries:
            target = self._shapes.get(entry.name)
            if target is None:
                problems.append(f"{entry.name} is not a weight of the model")
                continue
            parameter, shape, dtype = target
            missing.pop(parameter, None)
            if shape != entry.shape:
                problems.append(f"{entry.name} has shape {list(entry.shape)} instead of {list(shape)}")
            if dtype.is_floating_point != entry.dtype.startswith(("float", "bfloat")):
                problems.append(f"{entry.name} is of {entry.dtype} instead of {str(dtype).removeprefix('torch.')}")
        problems += [f"{name} is missing" for name in missing.values()]
        if problems:
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise WeightSyncError(
                f"weights of version {publication.version} do not fit {self._model_name}; nothing was changed: "
                + "; ".join(problems[:_SHOWN])
                + more
            )


def copy_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite the model's weights in place with checked ones; returns when nothing reads them any more."""
    targets = dict(model.named_parameters(remove_duplicate=False))
    copies = TensorCopies()
    with torch.no_grad():
        for name, tensor in tensors:
            copies.add(targets[name], tensor)
        copies.finish()
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


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

"""Gradients of one step against those of another, where they are computed: only figures go elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from penstock.errors import StepStateError
from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class GradientDifference:
    """How far gradients are from those that were kept."""

    relative: float
    """Norm of the difference over the norm of those that were kept; NaN if that is 0."""
    worst_parameter: str
    """The one that contributes most."""


@runtime_checkable
class ComparesGradients(Protocol):
    """A trainer that compares the raw gradients of its open step with those of an earlier one."""

    async def keep_gradients(self) -> float:
        """Keep a copy of the open step's; returns their norm."""

    async def gradient_difference(self) -> GradientDifference:
        """How the open step's differ from those that were kept."""

    async def forget_gradients(self) -> None:
        """Free the copy."""


class GradientComparison:
    """Differences from one set of gradients, relative to its global norm, in float64 and one tensor at a time.

    Example: `keep` of gradients (3, 4) returns 5; the `difference` of (3, 5) is 0.2, in the second parameter.
    """

    def __init__(self) -> None:
        self._kept: Mapping[str, Tensor] | None = None
        self._norm = 0.0

    def keep(self, gradients: Mapping[str, Tensor]) -> float:
        """Copy these to CPU memory, in place of those before; returns their norm."""
        self._kept = {name: gradient.detach().to("cpu", copy=True) for name, gradient in gradients.items()}
        self._norm = sum(float(gradient.double().square().sum()) for gradient in self._kept.values()) ** 0.5
        return self._norm

    def difference(self, gradients: Mapping[str, Tensor]) -> GradientDifference:
        """How these differ from what was kept."""
        if self._kept is None:
            raise StepStateError("gradient_difference: there is nothing to compare with; call keep_gradients first")
        squares = {
            name: _square(gradients.get(name), self._kept.get(name)) for name in self._kept.keys() | gradients.keys()
        }
        worst = max(squares, key=squares.__getitem__, default="")
        relative = sum(squares.values()) ** 0.5 / self._norm if self._norm else float("nan")
        return GradientDifference(relative, worst)

    def forget(self) -> None:
        """Free the copy."""
        self._kept = None


def _square(one: Tensor | None, other: Tensor | None) -> float:
    """Of the difference; a parameter without a gradient counts as one with zeros."""
    sides = [side.detach().cpu().double() for side in (one, other) if side is not None]
    return float((sides[0] - sides[1] if len(sides) == 2 else sides[0]).square().sum())

"""A trainer's weights as receivers see them: named tensors of one version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightSource:
    """Named tensors of one version; iterated lazily, so a sharded trainer never gathers the whole model twice."""

    version: int
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields `(name, tensor)` with Hugging Face names, tied weights once."""

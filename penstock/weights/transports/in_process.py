"""The trainer's own tensors, read in place by receivers in the same process."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

from torch import Tensor

from penstock.errors import WeightSyncError
from penstock.weights.policy_weights import ReadTensors
from penstock.weights.publication import InProcessEndpoint
from penstock.weights.site import site_of

_lock = threading.Lock()
_offered: dict[int, ReadTensors] = {}
_keys = itertools.count(1)


def offer(tensors: ReadTensors) -> InProcessEndpoint:
    """Let receivers of this process read tensors until they are withdrawn."""
    site = site_of()
    with _lock:
        key = next(_keys)
        _offered[key] = tensors
    return InProcessEndpoint(site.machine, site.process, key)


def withdraw(endpoint: InProcessEndpoint) -> None:
    """End an offer; a receiver that has opened it keeps what it has. A second call is a no-op."""
    with _lock:
        _offered.pop(endpoint.key, None)


class InProcessWeights:
    """Tensors that were offered in this process."""

    def __init__(self, endpoint: InProcessEndpoint) -> None:
        with _lock:
            tensors = _offered.get(endpoint.key) if endpoint.process == os.getpid() else None
        if tensors is None:
            raise WeightSyncError(
                "the published weights are no longer there: they were released, or their trainer has published twice "
                "since; publish them again"
            )
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read in place."""
        return self._tensors()

    def close(self) -> None:
        """Nothing to let go of."""

"""Penstock: asynchronous reinforcement learning of language models.

`load_config` and `train` are the front door; the parts (`SingleController`, `ReplayBuffer`, `StalenessSampler`,
`DataPlaneClient`, trainers, engines) live in the sub-packages and can be used on their own. Names are resolved on first
use, so that `import penstock` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_LAZY = {
    "load_config": "penstock.config.loading",
    "RunConfig": "penstock.config.models",
    "train": "penstock.run.train",
    "resume": "penstock.run.train",
    "RunResult": "penstock.run.train",
    "SingleController": "penstock.controller.controller",
    "ReplayBuffer": "penstock.buffer.replay_buffer",
    "StalenessSampler": "penstock.buffer.samplers.base",
    "DataPlaneClient": "penstock.data_plane.client",
    "KVBatchMeta": "penstock.data_plane.meta",
    "PenstockError": "penstock.errors",
}

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:  # for type checkers, which cannot follow the lazy names below
    from penstock.buffer.replay_buffer import ReplayBuffer as ReplayBuffer
    from penstock.buffer.samplers.base import StalenessSampler as StalenessSampler
    from penstock.config.loading import load_config as load_config
    from penstock.config.models import RunConfig as RunConfig
    from penstock.controller.controller import SingleController as SingleController
    from penstock.data_plane.client import DataPlaneClient as DataPlaneClient
    from penstock.data_plane.meta import KVBatchMeta as KVBatchMeta
    from penstock.errors import PenstockError as PenstockError
    from penstock.run.train import RunResult as RunResult
    from penstock.run.train import resume as resume
    from penstock.run.train import train as train


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)

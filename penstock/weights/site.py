"""Where this process's weights live, as others are told."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.weights.publication import WeightSite

if TYPE_CHECKING:
    import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def site_of(device: torch.device | str = "cpu") -> WeightSite:
    """This process, and a device of it; GPUs are told apart by their UUIDs, as every process numbers them anew."""
    name = str(device)
    return WeightSite(_machine(), os.getpid(), _gpu_uuid(name) if name.startswith("cuda") else "cpu")


@cache
def _machine() -> str:
    """Tells machines apart, also those that have the same host name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _gpu_uuid(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)

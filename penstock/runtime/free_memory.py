"""How much memory is available."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """What a process could allocate: the GPU's free memory, or what the machine (or container) has available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(available_bytes(_MEMINFO), container_bytes(_CGROUP))


def available_bytes(meminfo: Path) -> int:
    """Linux's own estimate; elsewhere half of the machine's memory."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def container_bytes(cgroup: Path) -> int:
    """What a container's limit leaves (cgroup v2); file caches can be reclaimed. Unlimited if there is no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        reclaimable = int(statistics.get("inactive_file", 0))
        return 2**62 if limit == "max" else int(limit) - used + reclaimable
    except (OSError, ValueError):
        return 2**62

"""Which parts work on this machine: installed or not, and whether they really import.

Every part is imported in its own process, with a time limit: a native library that crashes, hangs or prints takes
nothing down with it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.data_plane.adapters.mooncake.libraries import about_missing, missing_library, needs_library
from penstock.data_plane.adapters.mooncake.wheel import OLDEST, WHEELS, requirement_here

IMPORT_SECONDS = 120.0


class PartStatus(Enum):
    """The state of a part."""

    WORKS = "works"
    BROKEN = "broken"
    MISSING = "not installed"


@dataclass(frozen=True)
class Part:
    """Something Penstock can use, or will.

    `probe` is Python code that imports it and prints a JSON object with details as its last line.
    """

    name: str
    purpose: str
    module: str
    distributions: tuple[str, ...]
    requirement: str
    core: bool = False
    used: bool = False
    probe: str | None = None
    extra: str | None = None
    """The extra of Penstock that brings it."""
    requirement_here: Callable[[], str] | None = None
    """What to install on this machine, if that depends on it; the extra brings `requirement`."""
    about_library: Callable[[str], str] = needs_library
    """What to say about a native library that it needs and the machine lacks."""

    @property
    def install(self) -> str | None:
        """The command that installs it; None if this version has no use for it, or it is part of Penstock."""
        if not self.used or not self.requirement:
            return None
        return f"pip install '{self.requirement_here() if self.requirement_here else self.requirement}'"


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about a part."""

    part: Part
    status: PartStatus
    version: str | None = None
    detail: str = ""

    @property
    def is_fatal(self) -> bool:
        """Whether it keeps Penstock from running."""
        return self.part.core and self.status is not PartStatus.WORKS

    def as_object(self) -> dict[str, Any]:
        """The diagnosis for programs."""
        return {
            "name": self.part.name,
            "purpose": self.part.purpose,
            "core": self.part.core,
            "used_by_this_version": self.part.used,
            "status": self.status.value,
            "version": self.version,
            "detail": self.detail or None,
            "extra": self.part.extra,
            "install": None if self.status is PartStatus.WORKS else self.part.install,
        }


_TORCH_PROBE = """
import json, torch
devices = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        devices.append(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)")
gpus = ", ".join(devices) if devices else "no CUDA device"
print(json.dumps({"detail": f"{torch.get_num_threads()} CPU threads, {gpus}"}))
"""

_SHM_PROBE = """
import json
from penstock.data_plane.adapters.shm.owner import ShmOwner
from penstock.data_plane.field_spec import objects
from penstock.data_plane.opening import connect
owner = ShmOwner(1_000_000)
client = connect(owner.address())
client.register_partition("p", [objects("x")])
assert owner.count_samples("p") == 0
client.close()
owner.close()
print(json.dumps({"detail": "processes of this user can share rows"}))
"""

_MOONCAKE_PROBE = """
import json
import mooncake.store
from penstock.data_plane.adapters.mooncake.master import find_master
from penstock.data_plane.adapters.mooncake.wheel import installed_wheels, wheel_here
find_master()
wheels = sorted(installed_wheels())
twice = f"; {' and '.join(wheels)} overwrite each other: keep one" if len(wheels) > 1 else ""
print(json.dumps({"detail": wheel_here() + twice}))
"""

PARTS: tuple[Part, ...] = (
    Part("torch", "training and generation", "torch", ("torch",), "torch>=2.6", True, True, _TORCH_PROBE),
    Part("transformers", "models and tokenizers", "transformers", ("transformers",), "transformers>=5.17", True, True),
    Part(
        "reasoning-gym",
        "the `reasoning_gym` environments",
        "reasoning_gym",
        ("reasoning-gym",),
        "reasoning-gym>=0.1.25",
        used=True,
        extra="reasoning-gym",
    ),
    Part(
        "math-verify",
        "the `math` environment",
        "math_verify",
        ("math-verify",),
        "math-verify>=0.8",
        used=True,
        extra="math",
    ),
    Part(
        "verifiers",
        "the `verifiers` environments",
        "verifiers",
        ("verifiers",),
        "verifiers>=0.4,<0.5",
        used=True,
        extra="environments",
    ),
    Part("datasets", "datasets", "datasets", ("datasets",), "datasets>=3", used=True, extra="data"),
    Part("pyarrow", "Parquet files", "pyarrow", ("pyarrow",), "pyarrow>=15", used=True, extra="data"),
    Part("shared memory", "data_plane.adapter `shm`", "penstock", (), "", used=True, probe=_SHM_PROBE),
    Part("ray", "clusters", "ray", ("ray",), "ray[default]>=2.40", extra="transfer-queue"),
    Part(
        "TransferQueue",
        "data_plane.adapter `transfer_queue`",
        "transfer_queue",
        ("TransferQueue",),
        "TransferQueue>=0.1.9",
        extra="transfer-queue",
    ),
    Part(
        "mooncake",
        "data_plane.adapter `transfer_queue` with backend `mooncake_cpu`",
        "mooncake",
        tuple(WHEELS.values()),
        f"{WHEELS[None]}>={OLDEST}",
        probe=_MOONCAKE_PROBE,
        extra="mooncake",
        requirement_here=requirement_here,
        about_library=about_missing,
    ),
    Part("vllm", "generation engine", "vllm", ("vllm",), "vllm"),
    Part("megatron-core", "parallel training", "megatron.core", ("megatron-core",), "megatron-core"),
    Part("peft", "LoRA adapters", "peft", ("peft",), "peft>=0.21", used=True, extra="lora"),
    Part("tensorboard", "metrics", "tensorboard", ("tensorboard",), "tensorboard>=2.15", used=True, extra="loggers"),
    Part("wandb", "metrics", "wandb", ("wandb",), "wandb>=0.31", used=True, extra="loggers"),
    Part(
        "mlflow",
        "metrics",
        "mlflow",
        ("mlflow", "mlflow-skinny"),
        "mlflow-skinny>=2.15",
        used=True,
        extra="loggers",
    ),
    Part(
        "prometheus-client",
        "metrics",
        "prometheus_client",
        ("prometheus-client",),
        "prometheus-client>=0.20",
        used=True,
        extra="prometheus",
    ),
)


def examine_all(parts: Sequence[Part] = PARTS, seconds: float = IMPORT_SECONDS) -> list[Diagnosis]:
    """The diagnoses, Python first, then the parts in their order."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [examine_python(), *pool.map(lambda part: examine(part, seconds), parts)]


def examine_python(version: tuple[int, int, int] = sys.version_info[:3]) -> Diagnosis:
    """The interpreter that runs Penstock."""
    part = Part("python", "the interpreter", "sys", (), "python>=3.11", core=True, used=True)
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Diagnosis(part, PartStatus.BROKEN, text, "Python 3.11 or newer is needed")
    return Diagnosis(part, PartStatus.WORKS, text)


def examine(part: Part, seconds: float = IMPORT_SECONDS) -> Diagnosis:
    """Look for one part and import it in its own process."""
    version = _installed_version(part.distributions)
    if version is None and not _is_importable(part.module):
        return Diagnosis(part, PartStatus.MISSING)
    code = part.probe or f"import importlib\nimportlib.import_module({part.module!r})"
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Diagnosis(part, PartStatus.BROKEN, version, f"did not import within {seconds:g} s")
    if process.returncode != 0:
        reason = failure_reason(process.returncode, process.stderr, part.about_library)
        return Diagnosis(part, PartStatus.BROKEN, version, reason)
    return Diagnosis(part, PartStatus.WORKS, version, _detail(process.stdout) if part.probe else "")


def failure_reason(returncode: int, stderr: str, about_library: Callable[[str], str] = needs_library) -> str:
    """Why an import failed, from how its process ended: names the missing library or package if it says so."""
    if returncode < 0:
        return f"crashed on import with {_signal_name(-returncode)}"
    library = missing_library(stderr)
    if library is not None:
        return about_library(library)
    module = re.search(r"No module named '([\w.]+)'", stderr)
    if module:
        return f"needs the Python package {module[1]}, which is not installed"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"import ended with exit code {returncode}"


def _installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _is_importable(module: str) -> bool:
    """Whether its top-level package is there; nothing is imported."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _detail(stdout: str) -> str:
    try:
        return str(json.loads(stdout.strip().splitlines()[-1])["detail"])
    except (IndexError, KeyError, TypeError, ValueError):
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Opens the routes that this installation has, and says why it leaves out others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.support.plane_raw import UNITS, mooncake_store, simple_storage
from benchmarks.support.plane_routes import AdapterRoute, RayRoute, Route
from benchmarks.support.plane_timing import Reader
from penstock.config.models import DataPlaneConfig
from penstock.data_plane.opening import ADAPTERS, open_data_plane
from penstock.errors import PenstockError

_CAPACITY_GB = 1.0
_LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 for the machine's address in its network, and this one as it is."""
NO_ADAPTER = "there is no such adapter yet"
_ROOT = Path(__file__).parents[2]


@dataclass
class Opened:
    """Routes that can be measured, the reader that has the other end of each, and what is missing."""

    routes: list[Route] = field(default_factory=list)
    reader: Any = None
    left_out: dict[str, str] = field(default_factory=dict)
    """Why, by route."""


@contextlib.contextmanager
def opened() -> Iterator[Opened]:
    """A Ray cluster of this process alone, on loopback, and all routes; everything is ended afterwards."""
    result = Opened()
    if find_spec("ray") is None:
        result.left_out = dict.fromkeys(OPENERS, "Ray is not installed: pip install 'penstock[transfer-queue]'")
        yield result
        return
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, dict(os.environ))
        ray = _start_ray(stack)
        result.reader = ray.remote(Reader).remote()
        for name, opener in OPENERS.items():
            _open(name, opener, result, stack)
        stack.callback(lambda: ray.get(result.reader.close.remote()))
        yield result


def _start_ray(stack: contextlib.ExitStack) -> Any:
    # Workers find the benchmark's own modules by it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # More are never used, and it warns of them at every call.
    os.environ["TQ_NUM_THREADS"] = str(min(8, os.cpu_count() or 1))
    import ray

    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace=f"penstock-benchmark-{os.getpid()}",
        object_store_memory=500_000_000,
        _node_ip_address=_LOOPBACK,
    )
    stack.callback(ray.shutdown)
    return ray


def _restore(environment: dict[str, str]) -> None:
    """Undo what was set here, and by the routes and their libraries."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _open(name: str, opener: Callable[[], Route | str], result: Opened, stack: contextlib.ExitStack) -> None:
    import ray

    try:
        route = opener()
    except (PenstockError, ImportError) as error:  # it is installed, and does not work here
        route = str(error)
    if isinstance(route, str):
        result.left_out[name] = route
        return
    stack.callback(route.close)
    ray.get(result.reader.open.remote(name, route.reader_end()))
    result.routes.append(route)


def _shm() -> Route:
    return AdapterRoute("shm", open_data_plane(DataPlaneConfig(adapter="shm", capacity_gb=_CAPACITY_GB)))


def _transfer_queue() -> Route | str:
    if "transfer_queue" not in ADAPTERS:
        return NO_ADAPTER
    settings = {"adapter": "transfer_queue", "capacity_gb": _CAPACITY_GB, "storage_units": UNITS}
    return AdapterRoute("transfer_queue", open_data_plane(DataPlaneConfig.model_validate(settings)))


def _mooncake() -> str:
    return NO_ADAPTER


def _tq_raw() -> Route | str:
    if find_spec("transfer_queue") is None:
        return "TransferQueue is not installed: pip install 'penstock[transfer-queue]'"
    return simple_storage()


def _mooncake_raw() -> Route | str:
    if find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'penstock[mooncake]'"
    return mooncake_store()


OPENERS: dict[str, Callable[[], Route | str]] = {
    "shm": _shm,
    "ray": RayRoute,
    "transfer_queue": _transfer_queue,
    "tq_raw": _tq_raw,
    "mooncake": _mooncake,
    "mooncake_raw": _mooncake_raw,
}
"""By route; a text says why there is none."""

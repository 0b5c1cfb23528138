"""The trainer of a run, in a thread of this process or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.config.models import RunConfig
from penstock.config.sections.model import ModelConfig
from penstock.data_plane.client import DataPlaneClient, DataPlaneOwner
from penstock.errors import ConfigError
from penstock.run.plan import lanes_on_gpu
from penstock.runtime.cpu import lanes_for_rest, threads_for_half
from penstock.runtime.workers import Placement, WorkerKind, WorkerSpec, start
from penstock.training.interface import Trainer
from penstock.training.workers.front import WorkerTrainer
from penstock.training.workers.none import NoTrainer
from penstock.weights.hf import pick_device


def _local(model: ModelConfig, data_plane: DataPlaneClient, **options: Any) -> Trainer:
    # Imported only for a trainer of this process: it brings along the code of models.
    from penstock.training.workers.local import LocalTrainer

    return LocalTrainer.from_pretrained(model, data_plane, **options)


_TRAINERS: dict[str, Callable[..., Trainer]] = {"local": _local}
"""What loads a trainer in this process, by `training.backend`."""
_SERVED = {"local": "penstock.training.workers.served:serve_local"}
"""What loads one in a process of its own."""


def build_trainer(config: RunConfig, data_plane: DataPlaneOwner) -> Trainer:
    """A trainer that has loaded its own weights. Not for the event loop: it takes as long as loading takes."""
    if config.training.backend == "none":
        return NoTrainer(data_plane, config.algorithm)
    return _in_process(config, data_plane) if config.runtime.trainer_process else _in_thread(config, data_plane)


def _in_thread(config: RunConfig, data_plane: DataPlaneOwner) -> Trainer:
    return _TRAINERS[config.training.backend](
        config.model,
        data_plane,
        algorithm=config.algorithm,
        training=config.training,
        device=config.runtime.device,
        seed=config.seed,
        **_options(config),
    )


def _in_process(config: RunConfig, data_plane: DataPlaneOwner) -> WorkerTrainer:
    options, timeouts = _options(config), config.runtime.timeouts
    arguments = {
        "model": config.model,
        "device": config.runtime.device,
        "seed": config.seed,
        "data_plane": data_plane.address(),
        "algorithm": config.algorithm,
        "training": config.training,
        "trainer": options,
    }
    spec = WorkerSpec(_SERVED[config.training.backend], arguments)
    placement = Placement(WorkerKind.PROCESS, "trainer", options["threads"])
    return WorkerTrainer(
        start(spec, placement, silence_seconds=timeouts.silence_seconds), start_seconds=timeouts.start_seconds
    )


def _options(config: RunConfig) -> dict[str, Any]:
    threads = threads_for_half(config.runtime.trainer_threads)
    return {
        "temperature": config.rollout.sampling.temperature,
        "threads": threads,
        "lanes": _lanes(config, threads),
        "longest_row": config.rollout.engine.max_model_len,
    }


def _lanes(config: RunConfig, threads: int) -> int:
    """A GPU computes one microbatch at a time."""
    device = pick_device(config.runtime.device)
    if device.type == "cpu":
        return lanes_for_rest(config.runtime.trainer_lanes, threads)
    if config.runtime.trainer_lanes > 1:
        raise ConfigError([lanes_on_gpu(config.runtime.trainer_lanes, str(device))])
    return 1

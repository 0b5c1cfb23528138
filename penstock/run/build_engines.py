"""The engines of a run: one for each rank, in threads of this process or in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.models import RunConfig
from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.base import GenerationEngine
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.handle import HFTokenizer
from penstock.runtime.cpu import threads_per_rank

Processes = Mapping[str, EngineProcess]
"""By the name of the rank."""
NO_PROCESSES: Processes = MappingProxyType({})


def _embedded(model: ModelConfig, **options: Any) -> GenerationEngine:
    # Imported only for engines of this process: it brings along the code of models.
    from penstock.rollout.engines.embedded import EmbeddedEngine

    return EmbeddedEngine.from_pretrained(model, **options)


_ENGINES: dict[str, Callable[..., GenerationEngine]] = {"embedded": _embedded}
"""What loads an engine in this process, by `rollout.engine.kind`."""


def rank_names(config: RunConfig) -> list[str]:
    """The names of the engine's ranks."""
    return [f"{config.rollout.engine.kind}-{number}" for number in range(config.rollout.engine.ranks)]


def begin_processes(config: RunConfig, *, awaits_weights: bool) -> Processes:
    """The engines' processes, if `runtime.engine_process` asks for them; they load while others load."""
    if not config.runtime.engine_process or config.rollout.replay_from is not None:
        return NO_PROCESSES
    processes: dict[str, EngineProcess] = {}
    try:
        for name in rank_names(config):
            processes[name] = _process(config, name, awaits_weights=awaits_weights)
    except BaseException:
        end_processes(processes)
        raise
    return processes


def end_processes(processes: Processes) -> None:
    """End processes that no engine has taken over, at once; those that have ended already are left alone."""
    for process in processes.values():
        process.kill()


def build_fleet(
    config: RunConfig, tokenizer: HFTokenizer, processes: Processes = NO_PROCESSES, *, awaits_weights: bool
) -> EngineFleet:
    """One engine per rank; with `awaits_weights` they serve once they have the trainer's. Not for the event loop."""

    def build(name: str, process: EngineProcess | None = None) -> GenerationEngine:
        if processes:
            begun = process or _process(config, name, awaits_weights=awaits_weights)
            return ProcessEngine(begun, config.runtime.timeouts)
        return _ENGINES[config.rollout.engine.kind](
            config.model,
            device=config.runtime.device,
            texts=lambda: tokenizer.texts,
            **_settings(config, name, awaits_weights=awaits_weights),
        )

    engines: list[GenerationEngine] = []
    try:
        for name in rank_names(config):
            engines.append(build(name, processes.get(name)))
    except BaseException:
        for engine in engines:
            asyncio.run(engine.close())
        raise
    return EngineFleet(
        engines,
        anew=config.deterministic,
        build=build,
        replacements=config.rollout.failure.engine_replacements,
        start_seconds=config.runtime.timeouts.start_seconds,
    )


def _process(config: RunConfig, name: str, *, awaits_weights: bool) -> EngineProcess:
    settings = _settings(config, name, awaits_weights=awaits_weights)
    return EngineProcess(config.model, config.runtime.device, **settings)


def _settings(config: RunConfig, name: str, *, awaits_weights: bool) -> dict[str, Any]:
    return {
        "name": name,
        "max_num_seqs": config.rollout.engine.max_num_seqs,
        "max_model_len": config.rollout.engine.max_model_len,
        "deterministic": config.deterministic,
        "kv_cache": config.weight_sync.kv_cache,
        "threads": threads_per_rank(
            config.runtime.engine_threads, config.rollout.engine.ranks, deterministic=config.deterministic
        ),
        "awaits_weights": awaits_weights,
    }

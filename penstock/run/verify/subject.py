"""What is checked: the parts of a run, built as `penstock train` builds them, and a few prompt groups."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.config.models import RunConfig
from penstock.controller.failures.classify import describe
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import ConfigError
from penstock.rollout.prompts import PromptVisit
from penstock.run.build import Serving, Training
from penstock.run.starting import parts_of
from penstock.run.verify.findings import Skipped
from penstock.weights.synchronizer import WeightSynchronizer


@dataclass(frozen=True)
class Limits:
    """How much a preflight may take."""

    groups: int = 8
    """The most prompt groups to generate; never more than a step has."""
    seconds: float = 600.0
    """For everything after the model is loaded. Groups, and then each check, get half of the remaining time, so one
    that hangs leaves time for the others. A trainer call that has begun is awaited."""


@dataclass(frozen=True)
class Sampled:
    """Prompt groups whose rows are in the data plane."""

    metas: tuple[KVBatchMeta, ...]
    failures: tuple[str, ...]
    """Prompts that produced no group, with the cause."""
    late: int
    """Groups that were not done in time."""
    seconds: float

    @property
    def meta(self) -> KVBatchMeta:
        """All rows; at least one group."""
        return KVBatchMeta.concat(self.groups)

    @property
    def groups(self) -> tuple[KVBatchMeta, ...]:
        """At least one group; a check that finds none is skipped."""
        if not self.metas:
            raise Skipped("needs a prompt group, but there is none")
        return self.metas


@dataclass(frozen=True)
class Subject:
    """The parts of a run, and the groups that were sampled for the checks."""

    config: RunConfig
    serving: Serving
    training: Training
    sampled: Sampled

    @property
    def data_plane(self) -> DataPlaneClient:
        """Where the rows are."""
        return self.training.data_plane


def verifiable(config: RunConfig) -> RunConfig:
    """The same run, writing nothing. Raises `ConfigError` if it has no engine or no trainer to compare."""
    problems = []
    if config.rollout.replay_from is not None:
        problems.append("rollout.replay_from: a run on recorded rollouts has no engine to verify; remove it")
    if config.training.backend == "none":
        problems.append("training.backend: none leaves no trainer to verify; use local")
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"record": False})})


@asynccontextmanager
async def built(config: RunConfig) -> AsyncIterator[tuple[Serving, Training]]:
    """The parts, as they are when a run begins: the engines have the trainer's weights. Always closed at the end."""
    async with parts_of(config) as (serving, training):
        trainer, limit = training.trainer, config.runtime.timeouts.weights_seconds
        synchronizer = WeightSynchronizer(serving.engines.receivers, limit, trainer.release_weights)
        await synchronizer.publish(await trainer.publish_weights(synchronizer.sites()))
        yield serving, training


async def sample(config: RunConfig, training: Training, limits: Limits) -> Sampled:
    """The first groups of the run, as many as a step has and `limits` allows, with the run's own sampling and seeds."""
    started = time.monotonic()
    inflight = asyncio.Semaphore(config.rollout.max_inflight_groups)

    async def one(index: int, visit: PromptVisit) -> KVBatchMeta | str:
        async with inflight:
            try:
                return (await training.manager.generate_and_push(visit, f"verify{index}", 0)).meta
            except Exception as error:  # noqa: BLE001 - a person reads it in the table
                return f"{visit.prompt.prompt_id}: {describe(error)}"

    count = min(limits.groups, config.training.prompt_groups_per_step)
    tasks = [asyncio.create_task(one(*each)) for each in enumerate(itertools.islice(training.stream, count))]
    try:
        done, late = await asyncio.wait(tasks, timeout=limits.seconds / 2)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    outcomes = [task.result() for task in tasks if task in done]
    return Sampled(
        metas=tuple(outcome for outcome in outcomes if isinstance(outcome, KVBatchMeta)),
        failures=tuple(outcome for outcome in outcomes if isinstance(outcome, str)),
        late=len(late),
        seconds=time.monotonic() - started,
    )

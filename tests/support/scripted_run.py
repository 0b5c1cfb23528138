"""A whole controller on scripted parts: real buffer, real pumps, real clock; no model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.factory import make_sampler
from penstock.config.models import RunConfig
from penstock.controller.bookkeeping.traced_trainer import TracedTrainer
from penstock.controller.controller import SingleController
from penstock.controller.parts import Parts
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.client import DataPlaneOwner
from penstock.observe.events import EventLog
from penstock.observe.samples import SampleLog
from penstock.observe.timeline import Timeline
from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory, checked_reward
from penstock.rollout.environments.extra_columns import declared_columns, row_schema
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.manager import PARTITION, RolloutManager, RolloutSettings
from penstock.rollout.prompts import Prompt, PromptStream
from penstock.training.workers.scripted import ScriptedTrainer

Reward = Callable[[Prompt], Any]
Script = Callable[[GenerationRequest], ScriptedResponse]


class NumberTokenizer:
    """Prompts are numbers; a number is its own token id."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return (int(text),)

    def encode(self, text: str) -> tuple[int, ...]:
        return (int(text),)

    def decode(self, token_ids: Sequence[int], ends: AbstractSet[int] | None = None) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class ScriptedEnvironment:
    """Prompts `0 … size - 1`; the reward is whatever the callable says, or raises."""

    size: int
    reward: Reward = lambda prompt: 1.0
    name: str = "scripted"

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(str(i), str(i)) for i in range(self.size)]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        prompt_ids = handle.encode_prompt(prompt.text)
        generation = await handle.generate(prompt_ids)
        reward = self.reward(prompt)
        if asyncio.iscoroutine(reward):
            reward = await reward
        segments = (Segment(prompt_ids), Segment(generation.token_ids, generation))
        return Trajectory(segments, checked_reward(reward, prompt), handle.decode(generation.token_ids))

    async def close(self) -> None:
        return


def quick(request: GenerationRequest) -> ScriptedResponse:
    """Every response is ready at once."""
    return ScriptedResponse(seconds=0.0)


def scripted_config(**sections: Any) -> RunConfig:
    """A config for scripted parts: 4 groups of 2 a step, strict on-policy, streaming."""
    base: dict[str, Any] = {
        "model": {"path": "scripted"},
        "data": {"shuffle": False},
        "rollout": {
            "environment": {"kind": "reasoning_gym:chain_sum"},
            "group_size": 2,
            "failure": {"backoff_seconds": 0},
        },
        "training": {"prompt_groups_per_step": 4},
    }
    for name, values in sections.items():
        if isinstance(values, dict):
            merged = {**base.get(name, {})}
            for key, value in values.items():
                merged[key] = {**merged[key], **value} if isinstance(merged.get(key), dict) else value
            base[name] = merged
        else:
            base[name] = values
    return RunConfig.model_validate(base)


@dataclass
class ScriptedRun:
    """Everything of one scripted run, for tests to look at afterwards."""

    config: RunConfig
    prompts: int = 8
    script: Script = quick
    reward: Reward = lambda prompt: 1.0
    trainer: ScriptedTrainer = field(default_factory=ScriptedTrainer)
    steps: list[dict[str, float]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ranks: int = 1
    engine: ScriptedEngine = field(init=False)
    """The first rank's first one."""
    engines: EngineFleet = field(init=False)
    another: Callable[[str], ScriptedEngine] | None = None
    """Makes the engine of a rank that died; None makes one like the first."""
    data_plane: DataPlaneOwner = field(default_factory=MemoryDataPlane)
    buffer: ReplayBuffer = field(init=False)
    controller: SingleController = field(init=False)
    after_step: Callable[[int], object] = lambda steps: None
    """Awaited where it gives something to await."""
    timeline: Timeline = field(default_factory=Timeline.off)
    samples: SampleLog = field(default_factory=SampleLog)
    environment: ScriptedEnvironment | None = None
    """None makes one of `prompts` and `reward`."""

    async def run(self, limit_seconds: float = 60.0) -> str:
        """Run to the end, or fail: nothing may hang."""
        self._build()
        async with asyncio.timeout(limit_seconds):
            return await self.controller.run()

    def _build(self) -> None:
        config = self.config
        environment = self.environment or ScriptedEnvironment(self.prompts, self.reward)
        declared = declared_columns(environment)
        names = [f"scripted-{number}" for number in range(self.ranks)] if self.ranks > 1 else ["scripted"]
        self.engine, *others = (ScriptedEngine(self.script, name=name) for name in names)
        self.engines = EngineFleet(
            [self.engine, *others],
            anew=self.config.deterministic,
            build=self._another,
            replacements=self.config.rollout.failure.engine_replacements,
        )
        self.data_plane.register_partition(PARTITION, row_schema(declared))
        n = config.training.prompt_groups_per_step
        sampler = make_sampler(config.staleness, n, config.deterministic)
        self.buffer = ReplayBuffer(sampler, config.buffer.max_buffered_groups)
        log = EventLog()
        log.subscribe(lambda name, event: self.events.append((name, dict(event))))
        settings = RolloutSettings(
            config.rollout.group_size,
            SamplingParams(max_new_tokens=8),
            config.seed,
            config.rollout.generation_timeout_seconds,
        )
        parts = Parts(
            stream=PromptStream(
                environment.prompts(Split.TRAIN),
                epochs=config.data.epochs,
                shuffle=config.data.shuffle,
                seed=config.seed,
            ),
            manager=RolloutManager(self.engines, environment, NumberTokenizer(), self.data_plane, settings),
            engines=self.engines,
            trainer=TracedTrainer(self.trainer, self.timeline),
            buffer=self.buffer,
            data_plane=self.data_plane,
            room=self.data_plane,
            events=log,
            timeline=self.timeline,
            samples=self.samples,
            extra_columns={column.name: str(column) for column in declared},
        )

        async def after_step(steps: int, metrics: dict[str, float]) -> None:
            self.steps.append(metrics)
            found = self.after_step(steps)
            if inspect.isawaitable(found):
                await found

        self.controller = SingleController(config, parts, after_step)

    def _another(self, name: str) -> ScriptedEngine:
        return ScriptedEngine(self.script, name=name) if self.another is None else self.another(name)

    @property
    def trained_groups(self) -> list[str]:
        """Group ids in the order they trained."""
        return [group for chunk in self.trainer.trained for group in chunk.group_ids]

    def names(self, event: str) -> list[dict[str, Any]]:
        """Fields of all events of this name."""
        return [found for name, found in self.events if name == event]

    @property
    def rows_left(self) -> int:
        """Rows still in the data plane."""
        return self.data_plane.count_samples(PARTITION)

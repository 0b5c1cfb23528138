"""The composition root: from a configuration to built objects."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.factory import make_sampler
from penstock.config.models import RunConfig
from penstock.data_plane.client import DataPlaneClient, DataPlaneOwner
from penstock.data_plane.opening import open_data_plane
from penstock.errors import ConfigError
from penstock.rollout.engines.base import SamplingParams
from penstock.rollout.environments.base import Environment, Split
from penstock.rollout.environments.extra_columns import declared_columns, row_schema
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.reward_log import RewardLog
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.handle import HFTokenizer
from penstock.rollout.manager import PARTITION, GroupSource, RolloutManager, RolloutSettings
from penstock.rollout.prompts import PromptStream
from penstock.rollout.recorded import Recording
from penstock.rollout.replay import RecordedEnvironment, RecordedStream, ReplaySource
from penstock.run.build_engines import NO_PROCESSES, Processes, build_fleet
from penstock.run.loss_columns import refuse_unknown_columns
from penstock.run.plan import planned_steps, prompt_room, stop_token_problems
from penstock.run.rollouts import open_recording, recording_writer, rollout_notes
from penstock.runtime.cancellation import ended_within
from penstock.runtime.workers.repeated import RepeatedCalls
from penstock.training.interface import Trainer
from penstock.weights.chat_template import template_problems
from penstock.weights.facts import TokenFacts, read_token_facts
from penstock.weights.hf import load_tokenizer, silence_progress_bars

_CLOSE_SECONDS = 30.0
"""How long an environment may take to close; each of its parts has less."""


@dataclass(frozen=True)
class Serving:
    """What is needed to generate and score: enough for an evaluation."""

    hf_tokenizer: Any
    tokenizer: HFTokenizer
    environment: Environment
    engines: EngineFleet
    """All engines; without ranks if rollouts are replayed."""
    sampling: SamplingParams
    facts: TokenFacts
    """What the model is; only workers have the model itself."""
    recording: Recording | None = None
    """What is replayed."""
    rewards: RewardLog = field(default_factory=RewardLog)
    """What rewards print, and where they run."""

    async def close(self) -> None:
        """Close engines and environment; one that does not finish closing is left behind."""
        try:
            await self.engines.close()
        finally:
            await _closed(self.environment)


@dataclass(frozen=True)
class Training:
    """What is needed on top of `Serving` to train."""

    steps: int
    """How many steps the run will have."""
    stream: PromptStream
    manager: GroupSource
    trainer: Trainer
    buffer: ReplayBuffer
    data_plane: DataPlaneOwner
    row_worker: RepeatedCalls
    """Reads and writes rows for the controller (`penstock.rollout.row_worker`)."""
    notes: tuple[str, ...] = ()
    """What a person should know before training begins."""


def build_serving(config: RunConfig, *, trains_too: bool, processes: Processes = NO_PROCESSES) -> Serving:
    """Tokenizer, environment and engines. With `trains_too` the engines wait for the trainer's first weights.

    A run that trains on recorded rollouts has no engine, and its only environment is the recording.
    """
    silence_progress_bars()
    hf_tokenizer = load_tokenizer(config.model)
    tokenizer = _tokenizer(config, hf_tokenizer)
    facts = read_token_facts(config.model)
    replays = trains_too and config.rollout.replay_from is not None
    rewards = RewardLog(Path(config.run_dir) / "rewards.log" if trains_too else None)
    recording = open_recording(config, hf_tokenizer, facts) if replays else None
    sampling = _sampling(config, tokenizer, hf_tokenizer, facts)
    environment = _environment(config, recording, rewards)
    try:
        engines = EngineFleet() if replays else build_fleet(config, tokenizer, processes, awaits_weights=trains_too)
    except BaseException:  # its reward processes would stay
        asyncio.run(_closed(environment))
        raise
    return Serving(
        hf_tokenizer=hf_tokenizer,
        tokenizer=tokenizer,
        environment=environment,
        sampling=sampling,
        engines=engines,
        facts=facts,
        recording=recording,
        rewards=rewards,
    )


async def _closed(environment: Environment) -> None:
    """Close it; one that does not finish closing is left behind."""
    await ended_within(environment.close(), _CLOSE_SECONDS)


def _tokenizer(config: RunConfig, hf_tokenizer: Any) -> HFTokenizer:
    problems = template_problems(getattr(hf_tokenizer, "chat_template", None), config.data, config.model.path)
    if problems:
        raise ConfigError(problems)
    variables = config.data.chat_template_kwargs
    return HFTokenizer(hf_tokenizer, chat_template=config.data.chat_template, template_kwargs=variables)


def _environment(config: RunConfig, recording: Recording | None, rewards: RewardLog) -> Environment:
    if recording is not None:
        return RecordedEnvironment(recording)
    return make_environment(config.rollout.environment, config.data, seed=config.seed, log=rewards)


def build_data_plane(config: RunConfig) -> DataPlaneOwner:
    """Where rows are between rollouts and trainer; their fields are known once there is an environment."""
    return open_data_plane(config.data_plane, keeps_events=config.observe.trace)


def build_training(
    config: RunConfig, serving: Serving, trainer: Trainer, data_plane: DataPlaneOwner, row_worker: RepeatedCalls
) -> Training:
    """Everything that training needs in addition to `serving`, around its trainer."""
    columns = declared_columns(serving.environment)
    refuse_unknown_columns(config.algorithm, columns, f"the environment {serving.environment.name}")
    data_plane.register_partition(PARTITION, row_schema(columns))
    sampler = make_sampler(config.staleness, config.training.prompt_groups_per_step, config.deterministic)
    stream = _stream(config, serving)
    return Training(
        steps=planned_steps(config, len(stream)),
        stream=stream,
        manager=_group_source(config, serving, data_plane),
        trainer=trainer,
        buffer=ReplayBuffer(sampler, config.buffer.max_buffered_groups, config.training.max_steps),
        data_plane=data_plane,
        row_worker=row_worker,
        notes=(*rollout_notes(config, serving.recording), *_prompt_notes(serving.environment)),
    )


def _prompt_notes(environment: Environment) -> tuple[str, ...]:
    """What was changed in prompts to make them writable."""
    repaired = sum(prompt.repaired for split in Split for prompt in environment.prompts(split))
    if not repaired:
        return ()
    prompts = "1 prompt has" if repaired == 1 else f"{repaired:,} prompts have"
    return (f"{prompts} text that is not Unicode (halves of surrogate pairs); each was replaced by U+FFFD",)


def _stream(config: RunConfig, serving: Serving) -> PromptStream:
    if serving.recording is not None:
        return RecordedStream(serving.recording.groups)
    return PromptStream(
        serving.environment.prompts(Split.TRAIN),
        epochs=config.data.epochs,
        shuffle=config.data.shuffle,
        seed=config.seed,
        generated=config.data.train_path is None,
    )


def _group_source(config: RunConfig, serving: Serving, data_plane: DataPlaneClient) -> GroupSource:
    if serving.recording is not None:
        return ReplaySource(serving.recording, data_plane)
    settings = RolloutSettings(
        config.rollout.group_size,
        serving.sampling,
        config.seed,
        config.rollout.generation_timeout_seconds,
        prompt_room(config),
    )
    writer = recording_writer(config, serving.hf_tokenizer, declared_columns(serving.environment))
    return RolloutManager(serving.engines, serving.environment, serving.tokenizer, data_plane, settings, writer)


def _sampling(config: RunConfig, tokenizer: HFTokenizer, hf_tokenizer: Any, facts: TokenFacts) -> SamplingParams:
    """Sampling for training; responses end at the model's and the tokenizer's end-of-sequence tokens."""
    sampling = config.rollout.sampling
    if problems := stop_token_problems(config, facts.vocabulary):
        raise ConfigError(problems)
    stop: set[int | None] = set(sampling.stop_token_ids)
    stop |= tokenizer.wordless_tokens(sampling.stop)
    eos = hf_tokenizer.eos_token_id
    stop.update(facts.eos_token_ids, eos if isinstance(eos, list) else [eos])
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(dict.fromkeys(sampling.stop)),
        stop_token_ids=frozenset(token for token in stop if token is not None and token < facts.vocabulary),
    )

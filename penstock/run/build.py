"""The composition root: from a configuration to built objects."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.factory import make_sampler
from penstock.config.models import RunConfig
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.opening import open_data_plane
from penstock.errors import ConfigError, SetupError
from penstock.rollout.engines.base import GenerationEngine, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.rollout.environments.base import Environment, Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.records import RewardRecords
from penstock.rollout.fleet import EngineFleet
from penstock.rollout.handle import HFTokenizer
from penstock.rollout.manager import PARTITION, GroupSource, RolloutManager, RolloutSettings
from penstock.rollout.prompts import PromptStream
from penstock.rollout.recorded import Recording
from penstock.rollout.replay import RecordedEnvironment, RecordedStream, ReplaySource
from penstock.run.plan import lanes_on_gpu, planned_steps, prompt_room, stop_token_problems
from penstock.run.rollouts import open_recording, recording_writer, rollout_notes
from penstock.runtime.awake import wait_awake
from penstock.runtime.cancellation import ended_within
from penstock.runtime.cpu import lanes_for_rest, threads_for_half, threads_per_rank
from penstock.runtime.threads import in_daemon_thread
from penstock.training.interface import Trainer
from penstock.training.workers.local import LocalTrainer
from penstock.training.workers.none import NoTrainer
from penstock.weights.chat_template import template_problems
from penstock.weights.hf import load_model, load_tokenizer, pick_device, silence_progress_bars
from penstock.weights.lora import LoraAdapter, attach_lora, plain_copy
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of

_ENGINES = {"embedded": EmbeddedEngine}
_TRAINERS = {("local", "local"): LocalTrainer}
"""By runtime and backend."""
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
    model: Any
    """The loaded model, with its adapters if `model.lora` asks for them; the engine has its own plain model if the run
    also trains."""
    recording: Recording | None = None
    """What is replayed."""
    rewards: RewardRecords = field(default_factory=RewardRecords)
    """What rewards print, and where they run."""

    async def close(self) -> None:
        """Close engines and environment; one that does not finish closing is left behind."""
        await self.engines.close()
        await ended_within(self.environment.close(), _CLOSE_SECONDS)


@dataclass(frozen=True)
class Training:
    """What is needed on top of `Serving` to train."""

    steps: int
    """How many steps the run will have."""
    stream: PromptStream
    manager: GroupSource
    trainer: Trainer
    buffer: ReplayBuffer
    data_plane: DataPlaneClient
    notes: tuple[str, ...] = ()
    """What a person should know before training begins."""

    async def close(self) -> None:
        """Close the trainer and release the rows."""
        await self.trainer.close()
        self.data_plane.close()


def build_serving(config: RunConfig, *, trains_too: bool) -> Serving:
    """Tokenizer, environment and engine. With `trains_too` the engine gets its own weights.

    A run that trains on recorded rollouts has no engine, and its only environment is the recording.
    """
    silence_progress_bars()
    hf_tokenizer = load_tokenizer(config.model)
    tokenizer = _tokenizer(config, hf_tokenizer)
    replays = trains_too and config.rollout.replay_from is not None
    rewards = RewardRecords(Path(config.run_dir) / "rewards.log" if trains_too else None)
    with _begun_processes(config, wanted=trains_too and not replays) as processes:
        model = _load_policy(config, trains_too=trains_too)
        recording = open_recording(config, hf_tokenizer, model) if replays else None
        return Serving(
            hf_tokenizer=hf_tokenizer,
            tokenizer=tokenizer,
            environment=_environment(config, recording, rewards),
            sampling=_sampling(config, tokenizer, hf_tokenizer, model),
            engines=EngineFleet() if replays else _fleet(config, model, tokenizer, processes, own_weights=trains_too),
            model=model,
            recording=recording,
            rewards=rewards,
        )


def _tokenizer(config: RunConfig, hf_tokenizer: Any) -> HFTokenizer:
    problems = template_problems(getattr(hf_tokenizer, "chat_template", None), config.data, config.model.path)
    if problems:
        raise ConfigError(problems)
    variables = config.data.chat_template_kwargs
    return HFTokenizer(hf_tokenizer, chat_template=config.data.chat_template, template_kwargs=variables)


async def serving_off_the_loop(config: RunConfig, *, trains_too: bool) -> Serving:
    """`build_serving` in a thread, so Ctrl-C is heard while a large model loads; what it built is then closed.

    The wait is limited by `runtime.timeouts`: a model that is still loading is released once it is loaded, if the
    process still runs.
    """
    timeouts, unwanted = config.runtime.timeouts, threading.Event()
    building = in_daemon_thread("penstock-build", _build_if_wanted, config, trains_too, unwanted)
    try:
        await asyncio.wait({building}, timeout=timeouts.start_seconds)
    except asyncio.CancelledError:
        await asyncio.wait({building}, timeout=timeouts.stop_seconds)
        if not building.done():
            unwanted.set()
        elif building.exception() is None:
            await building.result().close()
        raise
    if not building.done():
        unwanted.set()
        raise SetupError(
            f"model {config.model.path!r} was not loaded after {timeouts.start_seconds:g} s; if it takes longer to "
            "load, raise runtime.timeouts.start_seconds"
        )
    return building.result()


async def training_off_the_loop(config: RunConfig, serving: Serving) -> Training:
    """`build_training` in a thread; waits at most `runtime.timeouts.start_seconds` for it."""
    limit = config.runtime.timeouts.start_seconds
    building = in_daemon_thread("penstock-build", build_training, config, serving)
    await wait_awake({building}, limit)
    if not building.done():
        raise SetupError(
            f"the trainer was not ready after {limit:g} s; if it takes longer to set up, raise "
            "runtime.timeouts.start_seconds"
        )
    return building.result()


def _build_if_wanted(config: RunConfig, trains_too: bool, unwanted: threading.Event) -> Serving:
    serving = build_serving(config, trains_too=trains_too)
    if unwanted.is_set():
        asyncio.run(serving.close())
    return serving


def _environment(config: RunConfig, recording: Recording | None, rewards: RewardRecords) -> Environment:
    if recording is not None:
        return RecordedEnvironment(recording)
    return make_environment(config.rollout.environment, config.data, seed=config.seed, records=rewards)


@contextlib.contextmanager
def _begun_processes(config: RunConfig, *, wanted: bool) -> Iterator[dict[str, EngineProcess]]:
    """The engines' processes, if `runtime.engine_process` asks for them; ended again if something else fails."""
    processes: dict[str, EngineProcess] = {}
    try:
        if wanted and config.runtime.engine_process:
            for name in rank_names(config):
                processes[name] = _process(config, name)
        yield processes
    except BaseException:
        for process in processes.values():
            process.end(patience_seconds=0)
        raise


def _process(config: RunConfig, name: str) -> EngineProcess:
    return EngineProcess(config.model, config.runtime.device, **_engine_settings(config, name))


def rank_names(config: RunConfig) -> list[str]:
    """The names of the engine's ranks."""
    return [f"{config.rollout.engine.kind}-{number}" for number in range(config.rollout.engine.ranks)]


def _engine_settings(config: RunConfig, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "max_num_seqs": config.rollout.engine.max_num_seqs,
        "max_model_len": config.rollout.engine.max_model_len,
        "deterministic": config.deterministic,
        "kv_cache": config.weight_sync.kv_cache,
        "threads": threads_per_rank(config.runtime.engine_threads, config.rollout.engine.ranks),
    }


def _fleet(
    config: RunConfig, model: Any, tokenizer: HFTokenizer, processes: dict[str, EngineProcess], *, own_weights: bool
) -> EngineFleet:
    """One engine per rank; the ranks start at the same time where they have processes."""

    def build(name: str, process: EngineProcess | None = None) -> GenerationEngine:
        if processes:
            begun = process or _process(config, name)
            return _process_engine(config, model, begun)
        shared = not own_weights and config.rollout.engine.ranks == 1 and not LoraAdapter.of(model)
        plain = model if shared else plain_copy(model)
        engine = _ENGINES[config.rollout.engine.kind]
        return engine(plain, **_engine_settings(config, name), texts=lambda: tokenizer.texts)

    engines: list[GenerationEngine] = []
    try:
        for name in rank_names(config):
            engines.append(build(name, processes.get(name)))
    except BaseException:
        for engine in engines:
            asyncio.run(engine.close())
        raise
    return EngineFleet(
        engines, anew=config.deterministic, build=build, replacements=config.rollout.failure.engine_replacements
    )


def _process_engine(config: RunConfig, model: Any, process: EngineProcess) -> ProcessEngine:
    """The engine of a process, with the trainer's first weights."""
    publisher = WeightPublisher()
    elsewhere = replace(site_of(), process=process.pid)
    try:
        first = publisher.publish(0, PolicyWeights.of(model), [elsewhere])
        return ProcessEngine(process, first, config.runtime.timeouts)
    finally:
        publisher.close()


def _load_policy(config: RunConfig, *, trains_too: bool) -> Any:
    """The model, with adapters if they are to be trained or trained ones already exist."""
    model = load_model(config.model, pick_device(config.runtime.device))
    lora = config.model.lora
    if lora is None or (lora.path is None and not trains_too):
        return model
    return attach_lora(model, lora, seed=config.seed)


def build_training(config: RunConfig, serving: Serving) -> Training:
    """Everything that training needs in addition to `serving`."""
    n = config.training.prompt_groups_per_step
    sampler = make_sampler(config.staleness, n, config.deterministic)
    data_plane = open_data_plane(config.data_plane)
    data_plane.register_partition(PARTITION, fields.ROW_SCHEMA)
    stream = _stream(config, serving)
    return Training(
        steps=planned_steps(config, len(stream)),
        stream=stream,
        manager=_group_source(config, serving, data_plane),
        trainer=_trainer(config, serving, data_plane),
        buffer=ReplayBuffer(sampler, config.buffer.max_buffered_groups),
        data_plane=data_plane,
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
    writer = recording_writer(config, serving.hf_tokenizer)
    return RolloutManager(serving.engines, serving.environment, serving.tokenizer, data_plane, settings, writer)


def _trainer(config: RunConfig, serving: Serving, data_plane: DataPlaneClient) -> Trainer:
    if config.training.backend == "none":
        return NoTrainer(serving.model, data_plane, config.algorithm)
    threads = threads_for_half(config.runtime.trainer_threads)
    return _TRAINERS[config.runtime.kind, config.training.backend](
        serving.model,
        data_plane,
        config.algorithm,
        config.training,
        temperature=config.rollout.sampling.temperature,
        threads=threads,
        lanes=_trainer_lanes(config, serving.model, threads),
        longest_row=config.rollout.engine.max_model_len,
    )


def _trainer_lanes(config: RunConfig, model: Any, threads: int) -> int:
    """A GPU computes one microbatch at a time."""
    if model.device.type == "cpu":
        return lanes_for_rest(config.runtime.trainer_lanes, threads)
    if config.runtime.trainer_lanes > 1:
        raise ConfigError([lanes_on_gpu(config.runtime.trainer_lanes, str(model.device))])
    return 1


def _sampling(config: RunConfig, tokenizer: HFTokenizer, hf_tokenizer: Any, model: Any) -> SamplingParams:
    """Sampling for training; responses end at the model's and the tokenizer's end-of-sequence tokens."""
    sampling = config.rollout.sampling
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if problems := stop_token_problems(config, vocabulary):
        raise ConfigError(problems)
    stop: set[int | None] = set(sampling.stop_token_ids)
    stop |= tokenizer.wordless_tokens(sampling.stop)
    for eos in (hf_tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        stop.update(eos if isinstance(eos, list) else [eos])
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=tuple(dict.fromkeys(sampling.stop)),
        stop_token_ids=frozenset(token for token in stop if token is not None and token < vocabulary),
    )

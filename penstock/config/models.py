"""The whole configuration of a run, and the rules between its sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.config.reading.values import usable_path
from penstock.config.rules.whole_config import contradictions
from penstock.config.sections.algorithm import AlgorithmConfig, ImportPath
from penstock.config.sections.base import Section
from penstock.config.sections.data import DataConfig
from penstock.config.sections.model import ModelConfig
from penstock.config.sections.observe import ObserveConfig
from penstock.config.sections.rollout import RolloutConfig
from penstock.config.sections.staleness import OnPolicyStaleness, StalenessConfig
from penstock.config.sections.timeouts import TimeoutsConfig
from penstock.config.sections.training import TrainingConfig

CONTRADICTIONS_ALLOWED = "contradictions_allowed"
"""In a validation's context: the rules between settings are left to the caller."""


class BufferConfig(Section):
    """The replay buffer."""

    max_buffered_groups: PositiveInt = 32
    """Capacity: groups that are dispatched or ready and not yet handed to the trainer."""


class WeightSyncConfig(Section):
    """How new weights reach the engine."""

    mode: Literal["in_flight", "drain", "abort_stale"] = "in_flight"
    """`in_flight`: swap between two tokens. `drain`: let running groups finish first. `abort_stale`: abort groups that
    are too old."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What running requests do with the KV cache they computed under the old weights."""


class DataPlaneConfig(Section):
    """Where tensors live between producers and consumers."""

    adapter: Literal["memory", "shm"] = "memory"
    """`memory`: in this process, without copies. `shm`: in memory that processes of this machine share (Linux)."""
    capacity_gb: PositiveFloat = 8.0
    """With `shm`: how much rows may take, in GB of 10^9 bytes. Memory is taken from the machine as it is used; columns
    added to rows that are already there may take half as much on top."""
    when_full: Literal["wait", "refuse"] = "wait"
    """With `shm`, if rows do not fit now: `wait` until others are cleared, or `refuse` with an error."""
    full_seconds: PositiveFloat = 240.0
    """With `shm` and `when_full: wait`: how long to wait for room before it is an error. Less than
    `rollout.failure.stall_seconds`, so that the error comes before the run looks stalled."""
    observe: bool = True
    """Measure every operation: one event each, and totals, bytes and latencies in metrics, timeline and report."""
    on_event: ImportPath | None = None
    """A function of your own that gets every event, as `module:callable`, in the process that makes it and on a thread
    of its own: it cannot fail a run or make it wait. Needs `observe`."""


class RuntimeConfig(Section):
    """Where the workers run."""

    kind: Literal["local"] = "local"
    """`local`: everything on this machine; engine and trainer in one thread each (see `engine_process` and
    `trainer_process`)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one."""
    engine_process: bool = False
    """Run the engine in a separate process: faster if engine and trainer compete for Python's
    interpreter lock (small models, CPU), at the cost of a slower start and of copying weights through shared memory."""
    trainer_process: bool = False
    """Run the trainer in a separate process; needs `data_plane.adapter: shm`. With `engine_process` too, the process of
    the run itself holds no model."""
    engine_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for each engine rank; 0 shares half of the cores among the ranks, and with `deterministic` means 1.
    The bits of a deterministic run depend on it: for the same bits everywhere leave 0, or use the same number."""
    trainer_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads for the trainer; 0 means half of the cores."""
    trainer_lanes: Annotated[int, Field(ge=0, le=64)] = 0
    """Microbatches that a trainer on the CPU processes in parallel, each with `trainer_threads`; 0 uses all cores."""
    restarts: NonNegativeInt = 0
    """How often a run that loses its trainer or its data plane goes back to its last checkpoint by itself, in the same
    command. After that, or without a checkpoint, it ends with the cause."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """How long the run waits for its parts to respond before it treats them as stuck."""


class CheckpointConfig(Section):
    """Saved weights and optimizer state."""

    every_steps: PositiveInt | None = None
    """Save after every this many steps."""
    every_minutes: PositiveFloat | None = 10.0
    """Save after the first step that ends this many minutes after the last save, in addition to `every_steps`: it
    limits what a killed run can lose. With neither, a killed run starts over."""
    at_end: bool = True
    """Save when the run ends by itself, is interrupted, has dropped or filtered too many prompts, stalls (`on_stall:
    stop`) or has lost its engine."""
    keep_latest: PositiveInt = 2
    """Number of latest checkpoints to keep, regardless of why they were saved."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints with the best `best_metric` to keep in addition to the latest."""
    best_metric: str = "eval/reward_mean"
    """With `keep_best`: name of a metric in `metrics.jsonl`; only checkpoints of steps that have a value can be
    best."""
    best_mode: Literal["max", "min"] = "max"
    """With `keep_best`: `max` if larger values are better, `min` if smaller values are better."""


class EvalConfig(Section):
    """Evaluation on the held-out prompts."""

    at_start: bool = True
    """Evaluate the initial weights."""
    at_end: bool = True
    """Evaluate the final weights."""
    every_steps: PositiveInt | None = None
    """Also evaluate after every this many steps; rollouts continue in the meantime, the trainer waits."""
    greedy: bool = True
    """Take the most likely token instead of sampling."""
    samples_per_prompt: PositiveInt = 1
    """Number of responses per held-out prompt; more than one needs `greedy: false`."""
    pass_at: list[PositiveInt] = Field(default_factory=list)
    """For each k in this list, report `eval/pass@k`: the probability that at least one of k responses passes, estimated
    without bias."""
    pass_reward: float = 1.0
    """A response with at least this reward passes."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of tokens in a response; by default as in training."""


class RunConfig(Section):
    """The whole run."""

    run_dir: str = "runs/default"
    """Folder for everything the run writes."""
    seed: NonNegativeInt = 0
    """Seed for data order and sampling."""
    deterministic: bool = False
    """Bitwise identical losses for the same seed on the CPU, with any number of engine ranks, in threads or processes;
    needs `in_order` staleness with lookahead 0, and `drain`. It is slower: engines compute fixed shapes, with one CPU
    thread per rank."""
    model: ModelConfig
    """The language model to train."""
    data: DataConfig = DataConfig()
    """The prompts."""
    rollout: RolloutConfig
    """Generation of prompt groups."""
    buffer: BufferConfig = BufferConfig()
    """The replay buffer."""
    staleness: StalenessConfig = Field(default_factory=OnPolicyStaleness)
    """Which groups may be dispatched, and which trained: the staleness policy."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Rewards, advantages, loss and corrections."""
    training: TrainingConfig = TrainingConfig()
    """The trainer."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights reach the engine."""
    data_plane: DataPlaneConfig = DataPlaneConfig()
    """Where tensors live between producers and consumers."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where the workers run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saved weights and optimizer state."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on the held-out prompts."""
    observe: ObserveConfig = ObserveConfig()
    """Console, trace, samples and loggers."""

    _usable_path = field_validator("run_dir")(usable_path)

    @model_validator(mode="after")
    def _no_contradictions(self, info: ValidationInfo) -> RunConfig:
        found = [] if (info.context or {}).get(CONTRADICTIONS_ALLOWED) else contradictions(self)
        if found:
            raise ValueError("\n".join(found))
        return self

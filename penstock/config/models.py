"""The whole configuration of a run, and the rules between its sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from penstock.config.algorithm import AlgorithmConfig
from penstock.config.base import Section
from penstock.config.rollout import RolloutConfig
from penstock.config.rules import contradictions
from penstock.config.sampler import OnPolicySampler, SamplerConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Section):
    """The language model that is trained."""

    path: str
    """Folder with a Hugging Face causal language model and its tokenizer, or a hub id (see `download`)."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Number format of the trainer's and the engine's weights."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    download: bool = False
    """Fetch a hub id from the network; off, only folders and what is already in the local cache are used."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you trust its author."""


class DataConfig(Section):
    """The prompts."""

    train_path: str | None = None
    """JSONL file with training prompts; procedural environments (reasoning_gym) need none."""
    eval_path: str | None = None
    """JSONL file with held-out prompts; procedural environments need none."""
    prompt_key: str = "prompt"
    """Which key of a JSONL record holds the prompt text."""
    answer_key: str = "answer"
    """Which key of a JSONL record holds the reference answer; may be absent from records."""
    train_size: PositiveInt = 1024
    """How many training prompts: generated, or read from the start of the file."""
    eval_size: PositiveInt = 64
    """How many held-out prompts: generated, or read from the start of the file."""
    epochs: PositiveInt = 1
    """How often the training prompts are gone through."""
    shuffle: bool = True
    """Shuffle the prompts anew at each epoch, by the run's seed."""
    chat_template: bool = False
    """Wrap each prompt as a user message with the tokenizer's chat template."""
    partial_step: Literal["train", "drop"] = "train"
    """What happens to a step that is not full when the data ends."""


class BufferConfig(Section):
    """The replay buffer."""

    max_buffered_groups: PositiveInt = 32
    """Slots: groups dispatched or ready and not yet handed to the trainer."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate; 0 leaves the weights as they are, to see how far engine and trainer agree."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    """AdamW's moment decay rates, each at least 0 and below 1."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or falling to `final_lr_ratio` of the peak at `training.max_steps`."""
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where a linear or cosine schedule ends, as a share of the peak."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""


class TrainingConfig(Section):
    """The trainer."""

    backend: Literal["local"] = "local"
    """`local`: one process, CPU or one GPU."""
    prompt_groups_per_step: PositiveInt = 8
    """N: groups one optimizer step consumes."""
    min_groups_per_chunk: PositiveInt = 1
    """How many groups must be ready before the trainer starts on them; N means batch at once."""
    batching: Literal["padded", "packed"] = "padded"
    """`padded`: rows of similar length side by side. `packed`: several rows in one, with document masks."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Tokens (padding included) of one forward and backward pass; a longer row goes alone."""
    logprob_chunk_tokens: PositiveInt = 1024
    """How many tokens' logits exist at the same time."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps; without it the data decides."""
    max_minutes: PositiveFloat | None = None
    """Stop, with a checkpoint, after this many minutes."""
    train_attempts: PositiveInt = 2
    """How often a step whose forward or backward pass raised is tried in all."""
    nonfinite: Literal["skip", "stop"] = "stop"
    """A step with a NaN or infinite loss or gradient: skip its update, or stop the run."""


class WeightsConfig(Section):
    """How new weights reach the engine."""

    update: Literal["in_flight", "drain", "abort_stale"] = "in_flight"
    """`in_flight`: swap between two tokens. `drain`: let running groups end first. `abort_stale`: abort the too old."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What running requests do with the KV cache they computed under the old weights."""


class DataPlaneConfig(Section):
    """Where tensors live between producers and consumers."""

    adapter: Literal["memory"] = "memory"
    """`memory`: in this process, without copies."""


class RuntimeConfig(Section):
    """Where the workers run."""

    kind: Literal["local"] = "local"
    """`local`: everything in this process; engine and trainer in a thread each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one."""
    engine_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of the engine's mathematics; 0 means half of the cores."""
    trainer_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of the trainer's mathematics; 0 means half of the cores."""


class CheckpointConfig(Section):
    """Saved weights and optimizer state."""

    every_steps: PositiveInt | None = None
    """Save after every so many steps; a last checkpoint is written at the end in any case unless `at_end` is off."""
    at_end: bool = True
    """Save when the run ends."""
    keep_latest: PositiveInt = 2
    """How many checkpoints are kept."""


class EvalConfig(Section):
    """Evaluation on the held-out prompts."""

    at_start: bool = True
    """Evaluate the initial weights."""
    at_end: bool = True
    """Evaluate the final weights."""
    greedy: bool = True
    """Take the likeliest token instead of sampling."""
    max_new_tokens: PositiveInt | None = None
    """Longest response; by default that of training."""


class ObserveConfig(Section):
    """What a person sees."""

    console: Literal["auto", "table", "plain", "off"] = "auto"
    """`auto`: a live table on a terminal, plain lines elsewhere."""


class RunConfig(Section):
    """A run."""

    run_dir: str = "runs/default"
    """Folder that receives everything the run writes."""
    seed: NonNegativeInt = 0
    """Seed of data order and sampling."""
    deterministic: bool = False
    """Bit-equal losses for equal seeds on the CPU; needs the `in_order` sampler with lookahead 0 and `drain`."""
    model: ModelConfig
    """The language model that is trained."""
    data: DataConfig = DataConfig()
    """The prompts."""
    rollout: RolloutConfig
    """Generation of prompt groups."""
    buffer: BufferConfig = BufferConfig()
    """The replay buffer."""
    sampler: SamplerConfig = Field(default_factory=OnPolicySampler)
    """Which groups may be dispatched, and which trained: the staleness policy."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The mathematics of a step."""
    training: TrainingConfig = TrainingConfig()
    """The trainer."""
    weights: WeightsConfig = WeightsConfig()
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
    """What a person sees."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> RunConfig:
        found = contradictions(self)
        if found:
            raise ValueError("\n".join(found))
        return self

"""Settings of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from penstock.config.sections.base import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate; 0 leaves the weights unchanged, to measure how closely engine and trainer agree."""
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
    """Final learning rate of a linear or cosine schedule, as a fraction of the peak."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""


class EarlyStopConfig(Section):
    """When to stop a run that has learnt enough, or no longer learns."""

    metric: str = "eval/reward_mean"
    """Name of a metric in `metrics.jsonl`; checked each time it has a value."""
    mode: Literal["max", "min"] = "max"
    """`max`: larger values are better. `min`: smaller values are better."""
    reached: float | None = None
    """Stop when the metric is at least (with `min`: at most) this."""
    patience: PositiveInt | None = None
    """Stop after this many values in a row without an improvement on the best so far."""
    min_change: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""


class TrainingConfig(Section):
    """The trainer."""

    backend: Literal["local", "none"] = "local"
    """`local`: one process, CPU or one GPU. `none`: no training; with `rollout.record`, the run only records
    rollouts."""
    prompt_groups_per_step: PositiveInt = 8
    """N: number of groups per training step."""
    min_groups_per_chunk: PositiveInt = 1
    """Number of groups that must be ready before the trainer starts on them; with N, the whole batch is trained at
    once."""
    minibatches_per_step: PositiveInt = 1
    """Number of optimizer updates per step, each on a share of its groups; above 1, the step waits for all of its
    groups."""
    batching: Literal["padded", "packed"] = "padded"
    """`padded`: sequences of similar length, one per row. `packed`: several sequences per row, with document masks."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Maximum number of tokens, including padding, in a forward and backward pass; a longer sequence gets a pass of its
    own."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens whose logits are in memory at the same time."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps; by default the run ends when the data does."""
    max_minutes: PositiveFloat | None = None
    """Stop, with a checkpoint, after this many minutes."""
    early_stop: EarlyStopConfig | None = None
    """Stop, with a checkpoint, by a metric."""
    train_attempts: PositiveInt = 2
    """Total attempts for a step whose forward or backward pass raises."""
    nonfinite: Literal["skip", "stop"] = "stop"
    """What to do if the loss or gradient of a step is NaN or infinite: `skip` its update, or `stop` the run."""

"""Settings of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from penstock.config.base import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


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


class EarlyStopConfig(Section):
    """When a run has learnt enough, or no longer learns."""

    metric: str = "eval/reward_mean"
    """A metric as in `metrics.jsonl`; judged each time it has a value."""
    mode: Literal["max", "min"] = "max"
    """Whether larger values of the metric are better, or smaller ones."""
    reached: float | None = None
    """Stop when the metric is at least (with `min`: at most) this."""
    patience: PositiveInt | None = None
    """Stop after this many values in a row that are no better than the best before them."""
    min_change: NonNegativeFloat = 0.0
    """By how much a value must be better to count as better."""


class TrainingConfig(Section):
    """The trainer."""

    backend: Literal["local", "none"] = "local"
    """`local`: one process, CPU or one GPU. `none`: nothing is trained; with `rollout.record`, rollouts only."""
    prompt_groups_per_step: PositiveInt = 8
    """N: groups one optimizer step consumes."""
    min_groups_per_chunk: PositiveInt = 1
    """How many groups must be ready before the trainer starts on them; N trains the whole batch at once."""
    minibatches_per_step: PositiveInt = 1
    """Updates a step makes, each with a share of its groups; above 1, the step waits for all of its groups."""
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
    early_stop: EarlyStopConfig | None = None
    """Stop, with a checkpoint, by a metric."""
    train_attempts: PositiveInt = 2
    """Total attempts for a step whose forward or backward pass raises."""
    nonfinite: Literal["skip", "stop"] = "stop"
    """A step with a NaN or infinite loss or gradient: skip its update, or stop the run."""

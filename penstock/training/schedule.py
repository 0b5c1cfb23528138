"""The learning rate as a pure function of the number of updates made."""

from __future__ import annotations

import math

from penstock.config.sections.training import OptimizerConfig


def learning_rate(config: OptimizerConfig, updates: int, max_steps: int | None) -> float:
    """The rate of the next update after `updates` of them.

    Rises linearly over `warmup_steps`, the first update already taking a share; then stays, or falls to
    `final_lr_ratio` of the peak at `max_steps` and stays there. Steps without an update do not count.
    """
    if updates < config.warmup_steps:
        return config.lr * (updates + 1) / config.warmup_steps
    if config.schedule == "constant" or max_steps is None:
        return config.lr
    span = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (updates - config.warmup_steps) / span)
    falling = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * falling)

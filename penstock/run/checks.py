"""Checks that need more than the configuration's own rules: the sampler's demands on the buffer."""

from __future__ import annotations

from penstock.buffer.samplers.factory import check_capacity, make_sampler
from penstock.config.models import RunConfig


def check_config(config: RunConfig) -> None:
    """Raise `ConfigError` for what would fail, or hang, later."""
    sampler = make_sampler(config.sampler, config.training.prompt_groups_per_step, config.deterministic)
    check_capacity(sampler, config.buffer.max_buffered_groups, config.training.min_groups_per_chunk)

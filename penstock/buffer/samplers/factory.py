"""From settings to a sampler, and whether the buffer is large enough for it."""

from __future__ import annotations

import importlib
from typing import cast

from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.ready_first import ReadyFirst
from penstock.buffer.samplers.weight_fifo import WeightFifo
from penstock.buffer.samplers.windowed import Order, Windowed
from penstock.config.sections.staleness import (
    CustomStaleness,
    InOrderStaleness,
    OnPolicyStaleness,
    ReadyFirstStaleness,
    StalenessConfig,
    WeightFifoStaleness,
    WindowedStaleness,
)
from penstock.errors import ConfigError
from penstock.text import error_text, named_error

_METHODS = sorted(name for name in vars(StalenessSampler) if not name.startswith("_"))


def make_sampler(config: StalenessConfig, prompt_groups_per_step: int, deterministic: bool = False) -> StalenessSampler:
    """The sampler that `config` names; `deterministic` makes `in_order` hand groups out in dispatch order."""
    n = prompt_groups_per_step
    match config:
        case InOrderStaleness():
            return InOrder(n, lookahead=config.lookahead, strict_sequence=deterministic)
        case _ if deterministic:
            raise ConfigError([f"staleness.policy: {config.policy} cannot train in a fixed order; use in_order"])
        case OnPolicyStaleness():
            return OnPolicy(n)
        case WindowedStaleness():
            return Windowed(n, config.max_staleness, config.over_sampling, Order(config.order))
        case WeightFifoStaleness():
            return WeightFifo(n, config.max_staleness, config.lookahead)
        case ReadyFirstStaleness():
            return ReadyFirst(n, config.lookahead)
        case CustomStaleness():
            return _custom(config, n)


def check_capacity(sampler: StalenessSampler, max_groups: int, min_groups_per_chunk: int) -> None:
    """Reject a buffer that some order of events would stop permanently."""
    name = getattr(sampler, "name", type(sampler).__name__)
    try:
        needed = sampler.required_capacity(min_groups_per_chunk)
        too_small = max_groups < needed
    except BaseException as error:  # a sampler may be the user's own
        reason = f"required_capacity of the staleness policy {name} raised {named_error(error)}"
        raise ConfigError([f"staleness.import_path: {reason}"]) from error
    if too_small:
        raise ConfigError(
            [
                f"buffer.max_buffered_groups: {max_groups} is too small for the staleness policy {name} with "
                f"training.min_groups_per_chunk = {min_groups_per_chunk}, which could then wait forever; "
                f"use at least {needed}"
            ]
        )


def _custom(config: CustomStaleness, prompt_groups_per_step: int) -> StalenessSampler:
    module_name, class_name = config.import_path.split(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except BaseException as error:  # the user's module may do anything while it is imported, `sys.exit()` included
        raise ConfigError(
            [f"staleness.import_path: {config.import_path} cannot be imported: {named_error(error)}"]
        ) from error
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            [
                f"staleness.import_path: {config.import_path} does not define {', '.join(missing)}; see "
                "penstock.buffer.samplers.base.StalenessSampler, or derive from BucketSampler there"
            ]
        )
    try:
        return cast(StalenessSampler, made(prompt_groups_per_step=prompt_groups_per_step, **config.args))
    except TypeError as error:
        raise ConfigError([f"staleness.args: {config.import_path} does not take them: {error_text(error)}"]) from error
    except BaseException as error:  # a user's constructor may raise anything
        raise ConfigError(
            [f"staleness.args: {config.import_path} cannot be constructed: {named_error(error)}"]
        ) from error

"""Settings of the staleness policies; one class per policy, so that a setting a policy ignores is an unknown key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, field_validator

from penstock.config.sections.base import Section


class OnPolicyStaleness(Section):
    """Strict: a step trains only on groups that were generated with exactly the weights it updates."""

    policy: Literal["on_policy"] = "on_policy"
    """Name of the policy."""


class WindowedStaleness(Section):
    """Groups may lag behind the trainer by up to `max_staleness` versions."""

    policy: Literal["windowed"] = "windowed"
    """Name of the policy."""
    max_staleness: NonNegativeInt = 1
    """W: maximum lag of a trained group, in weight versions."""
    over_sampling: bool = False
    """True: dispatch until the buffer is full. False: dispatch only what can still be trained in time, step by step."""
    order: Literal["oldest", "freshest"] = "oldest"
    """Which selectable groups are trained first."""


class InOrderStaleness(Section):
    """Every group is stamped with the step that will train it."""

    policy: Literal["in_order"] = "in_order"
    """Name of the policy."""
    lookahead: NonNegativeInt = 1
    """How many steps ahead of the current one groups may be dispatched; also the maximum lag of a trained group."""


class WeightFifoStaleness(Section):
    """Trains the oldest weight version in the window first, and waits for its groups to finish."""

    policy: Literal["weight_fifo"] = "weight_fifo"
    """Name of the policy."""
    max_staleness: NonNegativeInt = 1
    """W: maximum lag of a trained group, in weight versions."""
    lookahead: NonNegativeInt = 1
    """How many steps ahead of the current one groups may be dispatched."""


class ReadyFirstStaleness(Section):
    """First ready, first trained; the lag has no bound, so an off-policy correction is required."""

    policy: Literal["ready_first"] = "ready_first"
    """Name of the policy."""
    lookahead: NonNegativeInt = 1
    """How many steps ahead of the current one groups may be dispatched."""


class CustomStaleness(Section):
    """A policy of your own: a class with the methods of `penstock.buffer.samplers.base.StalenessSampler`."""

    policy: Literal["custom"] = "custom"
    """Name of the policy."""
    import_path: str
    """`module:Class`; called with `prompt_groups_per_step` and with `args` as keyword arguments."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the class."""

    @field_validator("import_path")
    @classmethod
    def _has_module_and_class(cls, value: str) -> str:
        if value.count(":") != 1 or not all(value.split(":")):
            raise ValueError("write it as module:Class, for example my_project.policies:Newest")
        return value


StalenessConfig = Annotated[
    OnPolicyStaleness
    | WindowedStaleness
    | InOrderStaleness
    | WeightFifoStaleness
    | ReadyFirstStaleness
    | CustomStaleness,
    Field(discriminator="policy"),
]

"""Settings of generation: engine, sampling, environment, failure policy."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from penstock.config.base import Section
from penstock.config.values import usable_path

_KINDS = ("math", "calculator", "function", "custom")
_NAMED_KINDS = {"reasoning_gym": "task", "verifiers": "environment"}
"""Kinds of environment that a name follows, and what it names."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _usable_stop(value: str) -> str:
    if not value:
        raise ValueError("is empty, and every response contains that")
    if "\ufffd" in value:
        raise ValueError("has U+FFFD, which stands for bytes that are no text")
    return value


StopString = Annotated[str, AfterValidator(_usable_stop)]


class EngineConfig(Section):
    """The generation engine."""

    kind: Literal["embedded"] = "embedded"
    """`embedded`: on this machine, continuous batching over a slot KV cache."""
    max_num_seqs: PositiveInt = 64
    """How many requests decode at the same time."""
    max_model_len: PositiveInt = 512
    """Tokens of prompt and response together that fit into a slot."""


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Logits are divided by this before sampling; the trainer uses the same value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: among the fewest tokens whose probabilities reach this. The trainer computes log-probs over the
    same tokens."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0 means all. The trainer computes log-probs over the same tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample among tokens at least this fraction as likely as the likeliest one; 0 means all. Applied after the
    temperature and before `top_k` and `top_p`. The trainer computes log-probs over the same tokens."""
    max_new_tokens: PositiveInt = 64
    """Longest response; one that reaches it, or the end of the engine's `max_model_len`, counts as truncated."""
    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Token ids that end a response, besides the tokenizer's end-of-sequence token."""
    stop: Annotated[list[StopString], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Texts that end a response: it ends with the token at which its text first contains one of them, and its text with
    the stop string. One text may stand without brackets."""

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RewardFunctionConfig(Section):
    """One of several reward functions."""

    import_path: str
    """`module:callable`, called by keyword with what its parameters name, and with `args`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Its part in the reward, which is the weighted sum of all; with 0 it is only measured."""
    name: str | None = None
    """What its value is called in metrics, samples and report (`reward/<name>`); nothing: the function's own name."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    batched: bool = False
    """Call it once for a whole group, with a list for every parameter but `args`; it returns a list."""


class EnvironmentConfig(Section):
    """Where prompts get their reward."""

    kind: str
    """`reasoning_gym:<task>`, `math`, `calculator`, `function`, `verifiers:<environment>` or `custom`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment itself; for `function` and `custom` keyword arguments for the function or class."""
    import_path: str | None = None
    """For `function`: `module:callable`, called by keyword with what its parameters name (`prompt`, `response`,
    `answer`, columns of the data, …) and with `args`; returns a number, or a mapping with `reward` and components. For
    `custom`: `module:Class`, an environment of your own, constructed with `args`."""
    rewards: list[RewardFunctionConfig] | None = Field(default=None, min_length=1)
    """For `function`, in place of a single one: several functions, each with `import_path`, `weight`, `name`, `args`
    and `batched`. The reward is the weighted sum of theirs."""
    timeout_seconds: PositiveFloat = 30.0
    """A reward, or the environment's part of a turn, that takes longer is a DATA failure."""
    workers: PositiveInt = 4
    """How many rewards, or environments between two turns of the model, run at the same time; rewards get that
    many processes, started when they are needed."""
    in_process: bool = False
    """Compute rewards in threads of this process. A reward that hangs or exits can then harm the run."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        head, _, name = value.partition(":")
        if (name and head in _NAMED_KINDS) or value in _KINDS:
            return value
        choices = [*_KINDS, *(f"{kind}:<{what}>" for kind, what in _NAMED_KINDS.items())]
        match = difflib.get_close_matches(head, [*_KINDS, *_NAMED_KINDS], n=1)
        hint = f"; did you mean {match[0]}?" if match else ""
        raise ValueError(f"unknown {value!r}{hint}; choose one of {', '.join(choices)}")


class FailureConfig(Section):
    """What happens when a rollout fails."""

    infra_attempts: PositiveInt = 5
    """Total attempts for INFRA failures (engine gone, timeout, connection)."""
    data_attempts: PositiveInt = 2
    """Total attempts for DATA failures (environment or reward raised, NaN reward)."""
    backoff_seconds: NonNegativeFloat = 0.5
    """Pause before the second attempt; doubled at each further one."""
    backoff_max_seconds: NonNegativeFloat = 30.0
    """The longest such pause."""
    max_dropped_prompts: NonNegativeInt = 0
    """How many prompts may be dropped before the run stops with an error."""
    on_drop: Literal["shrink", "replace"] = "replace"
    """`shrink`: the step continues with one group fewer. `replace`: the next prompt takes its place."""
    min_groups_per_step: PositiveInt = 1
    """With `shrink`: a step that would have fewer groups than this stops the run."""
    stall_seconds: PositiveFloat = 300.0
    """Without a committed group or a finished step for this long, the run says what everything waits for."""
    on_stall: Literal["report", "stop"] = "report"
    """Whether a stall also stops the run."""
    max_redispatches: PositiveInt = 8
    """How often a prompt's group may be thrown away by the staleness policy before the trainer has made a step, until
    the prompt is dropped. Groups that became too old because the trainer moved on do not count."""


class RolloutConfig(Section):
    """Generation of prompt groups."""

    engine: EngineConfig = EngineConfig()
    """The generation engine."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are sampled."""
    environment: EnvironmentConfig
    """Where prompts get their reward."""
    failure: FailureConfig = FailureConfig()
    """What happens when a rollout fails."""
    group_size: PositiveInt = 8
    """G: responses sampled for each prompt."""
    max_inflight_groups: PositiveInt = 16
    """How many prompt groups may be in generation or reward at the same time."""
    generation_timeout_seconds: PositiveFloat = 600.0
    """A generation request that takes longer is an INFRA failure."""
    record: bool = False
    """Write every group's rows to `rollouts/` in the run directory, to be trained on again with `replay_from`."""
    replay_from: str | None = None
    """Run directory with recorded rollouts: groups come from there, in order of dispatch, and there is no engine; the
    prompts of `data`, `rollout.environment` and `rollout.engine` are not used."""

    _usable_path = field_validator("replay_from")(usable_path)

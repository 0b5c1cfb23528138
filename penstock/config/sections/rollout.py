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

from penstock.config.reading.values import usable_path
from penstock.config.sections.base import Section

_KINDS = ("math", "calculator", "function", "custom")
_NAMED_KINDS = {"reasoning_gym": "task", "verifiers": "environment"}
"""Kinds of environment that a name follows, and what it names."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _usable_stop(value: str) -> str:
    if not value:
        raise ValueError("is empty; every response contains the empty string")
    if "\ufffd" in value:
        raise ValueError("has U+FFFD, which stands for bytes that are not text")
    return value


StopString = Annotated[str, AfterValidator(_usable_stop)]


class EngineConfig(Section):
    """The generation engine."""

    kind: Literal["embedded"] = "embedded"
    """`embedded`: on this machine, continuous batching over a slot KV cache."""
    ranks: PositiveInt = 1
    """Number of engines, each with a copy of the weights; requests are shared out among them. They are threads of the
    run's process, or processes of their own with `runtime.engine_process`."""
    max_num_seqs: PositiveInt = 64
    """Maximum number of requests that a rank decodes at the same time."""
    max_model_len: PositiveInt = 512
    """Maximum number of tokens of a request, prompt and response together."""


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: Annotated[float, Field(ge=1e-3)] = 1.0
    """Logits are divided by this before sampling; the trainer uses the same value."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities sum to at least this. The trainer
    computes log-probs over the same tokens."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0 means all. The trainer computes log-probs over the same tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from the tokens at least this fraction as likely as the most likely one; 0 means all. Applied after the
    temperature and before `top_k` and `top_p`. The trainer computes log-probs over the same tokens."""
    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens in a response; a response that reaches it, or the engine's `max_model_len`, counts as
    truncated."""
    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Token ids that end a response, in addition to the tokenizer's end-of-sequence token."""
    stop: Annotated[list[StopString], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Strings that end a response: generation stops with the token that completes one of them, and the response's text
    ends with the stop string. A single string needs no brackets."""

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class RewardFunctionConfig(Section):
    """One of several reward functions."""

    import_path: str
    """`module:callable`, called with the keyword arguments that its parameters name, and with `args`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Weight of its value in the reward, which is the weighted sum of all functions; with 0 the value is only
    recorded."""
    name: str | None = None
    """Name of its value in metrics, samples and report (`reward/<name>`); by default the function's own name."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""
    batched: bool = False
    """Call it once per group, with a list for every parameter except `args`; it must return a list."""


class EnvironmentConfig(Section):
    """Where rewards come from."""

    kind: str
    """`reasoning_gym:<task>`, `math`, `calculator`, `function`, `verifiers:<environment>` or `custom`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the environment; for `function` and `custom`, keyword arguments for the function or class."""
    import_path: str | None = None
    """For `function`: `module:callable`, called with the keyword arguments that its parameters name (`prompt`,
    `response`, `answer`, columns of the data, …) and with `args`; returns a number, or a mapping with `reward` and
    components. For `custom`: `module:Class`, an environment of your own, constructed with `args`."""
    rewards: list[RewardFunctionConfig] | None = Field(default=None, min_length=1)
    """For `function`, instead of `import_path`: several functions, each with `import_path`, `weight`, `name`, `args`
    and `batched`. The reward is their weighted sum."""
    timeout_seconds: PositiveFloat = 30.0
    """A reward, or the environment's part of a turn, that takes longer is a DATA failure."""
    workers: PositiveInt = 4
    """Maximum number of rewards, or of environment turns, computed at the same time; rewards get this many processes,
    started on demand."""
    in_process: bool = False
    """Compute rewards in threads of the run's own process, where a reward that hangs or exits can take the run down."""

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
    """Delay before the second attempt; doubled for each further attempt."""
    backoff_max_seconds: NonNegativeFloat = 30.0
    """Maximum delay between attempts."""
    engine_replacements: NonNegativeInt = 3
    """How many times in a row an engine rank that dies (killed, silent for `runtime.timeouts.silence_seconds`, failed)
    is replaced by a new one, with the delays above, before it counts as lost; taking the weights of the next step
    starts the count anew. When no rank is left the run ends with the engine's error."""
    max_dropped_prompts: NonNegativeInt = 0
    """Number of prompts that may be dropped before the run stops with an error."""
    on_drop: Literal["shrink", "replace"] = "replace"
    """`shrink`: the step continues with one group fewer. `replace`: the next prompt takes its place."""
    min_groups_per_step: PositiveInt = 1
    """With `shrink`: a step that would have fewer groups than this stops the run."""
    stall_seconds: PositiveFloat = 300.0
    """If no group is committed and no step finishes for this long, the run reports what each part is waiting for."""
    on_stall: Literal["report", "stop"] = "report"
    """Whether to only report a stall, or also stop the run."""
    max_redispatches: PositiveInt = 8
    """How many times the staleness policy may discard a prompt's group before the trainer completes a step; after that
    the prompt is dropped. Groups that become too old because the trainer moved on do not count."""


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
    """G: number of responses sampled per prompt."""
    max_inflight_groups: PositiveInt = 16
    """Maximum number of prompt groups that are generated or scored at the same time."""
    generation_timeout_seconds: PositiveFloat = 600.0
    """A generation request that takes longer is an INFRA failure."""
    record: bool = False
    """Write every group's rows to `rollouts/` in the run directory, so that `replay_from` can train on them later."""
    replay_from: str | None = None
    """Run directory with recorded rollouts to train on, in order of dispatch and without an engine; the prompts of
    `data`, `rollout.environment` and `rollout.engine` are not used."""

    _usable_path = field_validator("replay_from")(usable_path)

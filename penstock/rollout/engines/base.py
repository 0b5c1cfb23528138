"""The interface of generation engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError
from penstock.runtime.wire.crossing import crosses
from penstock.weights.receiver import WeightReceiver


@crosses
class FinishReason(Enum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    PREEMPTED = "preempted"
    """The engine gave the request back unfinished; only a fleet sees this, and sends the request on."""


@crosses
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy: the likeliest token, with its log-prob under temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    """Tokens whose probability is below this fraction of the largest one are left out; 0 means none are."""
    stop_token_ids: frozenset[int] = frozenset()
    """A response ends with, and includes, the first of these."""
    stop: tuple[str, ...] = ()
    """A response ends with the token at which its text first contains one of these. The token may extend beyond it."""


@crosses
@dataclass(frozen=True)
class GeneratedTokens:
    """The beginning of a response that another engine generated; the lists have one entry per token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    token_versions: tuple[int, ...]
    kept_ids: tuple[NDArray[np.int32], ...] = field(default=(), compare=False)
    """As in `GenerationResult`."""


@crosses
@dataclass(frozen=True)
class GenerationRequest:
    """One response to be generated."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    """Makes the response reproducible regardless of what shares its batch."""
    group_id: str = ""
    """Requests of one group share their prompt's prefill."""
    generated: GeneratedTokens | None = None
    """What the response already has: the engine continues from there, with the random numbers that come next, and
    returns the whole response. `max_new_tokens` counts these tokens too."""


@crosses
@dataclass(frozen=True)
class GenerationResult:
    """One generated response; the lists have one entry per generated token."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token under the distribution it was sampled from: after the temperature, and over the tokens
    that the truncation kept."""
    token_versions: tuple[int, ...]
    """Weight version that produced each token."""
    finish_reason: FinishReason
    stop_string: str | None = None
    """The stop string that ended it."""
    kept_ids: tuple[NDArray[np.int32], ...] = field(default=(), compare=False)
    """If sampling is truncated: the token ids that each token was drawn from; a token without ids was drawn from the
    whole vocabulary. Empty if every token of the response was drawn from the whole vocabulary."""


@crosses
class EngineHealth(Enum):
    """Whether an engine can serve."""

    HEALTHY = "healthy"
    PAUSED = "paused"
    SILENT = "silent"
    """Its process shows no sign of life; it may be stopped."""
    FAILED = "failed"
    CLOSED = "closed"


@crosses
@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    tokens_generated: int = 0
    busy_seconds: float = 0.0
    """Time in decode steps and prefills."""
    slot_seconds: float = 0.0
    """Busy time weighted by the share of slots in use."""
    version: int = 0
    step_seconds: float = field(default=0.0, compare=False)
    """How long the decode step or other work of its thread has been running; 0 while it waits for work."""
    silent_seconds: float = field(default=0.0, compare=False)
    """How long its process has shown no sign of life."""
    process: int = 0
    """The id of its process, if it has its own."""
    extra: dict[str, float] = field(default_factory=dict)


class GenerationEngine(WeightReceiver, Protocol):
    """One replica of a generation engine. Its calls around new weights come from `WeightReceiver`."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one response. Cancelling the call aborts the request; `abort` makes it raise `RequestAborted`."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; unknown ids are ignored."""

    async def preempt(self) -> None:
        """Give all requests back at the next token boundary: each `generate` call returns what it has so far, with
        `FinishReason.PREEMPTED`. Also while paused."""

    async def sleep(self, level: int = 1) -> None:
        """Free what can be freed while idle: level 1 the KV cache, level 2 the weights too."""

    async def wake(self) -> None:
        """Undo `sleep`; after level 2 the engine serves only once it has new weights."""

    def stats(self) -> EngineStats:
        """Counters since the start."""

    def health(self) -> EngineHealth:
        """Whether the engine can serve now."""

    def when_lost(self, call: Callable[[EngineError], None]) -> None:
        """Call this, from any thread, with the cause when the engine has failed for good; at once if it already has."""

    async def close(self) -> None:
        """Abort running requests and end the engine's threads; a second call is a no-op."""

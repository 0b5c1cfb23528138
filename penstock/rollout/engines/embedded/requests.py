"""A request inside the engine: the checks on entry, and the ticket that follows it until it is settled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FailureKind, PenstockError, PromptTooLong
from penstock.rollout.engines.base import FinishReason, GeneratedTokens, GenerationRequest, GenerationResult
from penstock.rollout.engines.stop_strings import StopWatch, wrong_stop


class InvalidRequest(PenstockError):
    """A request that no engine could serve: no prompt, a token outside the vocabulary, impossible sampling settings."""

    failure_kind = FailureKind.DATA


@dataclass(eq=False)
class Ticket:
    """One request on its way through the engine; compared by identity, because ids may be used again later."""

    request: GenerationRequest
    future: asyncio.Future[GenerationResult]
    version_marks: list[tuple[int, int]] = field(default_factory=list)
    """`(index, version)`: from this generated token on, this version. Empty until the request gets its slot."""
    new_watch: Callable[[], StopWatch] | None = None
    """Makes the watch for the request's stop strings, if it has any."""
    watch: StopWatch | None = None
    """The watch, once the request has its slot."""
    stop_string: str | None = None
    """The one that was found."""

    @cached_property
    def given_ids(self) -> tuple[int, ...]:
        """The prompt, and what another engine has already generated."""
        generated = self.request.generated
        return self.request.prompt_ids if generated is None else self.request.prompt_ids + generated.token_ids

    @property
    def earlier(self) -> int:
        """How many tokens of the response another engine has generated."""
        return len(self.given_ids) - len(self.request.prompt_ids)

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What is prefilled: all that is given but its last token, which goes through the first decode step."""
        return self.given_ids[:-1]

    def begin_watch(self) -> bool:
        """Whether the request has stop strings, which are looked for from here on."""
        self.watch = None if self.new_watch is None else self.new_watch()
        if self.watch is not None:
            for token in self.given_ids[len(self.request.prompt_ids) :]:
                self.watch.push(token)
        return self.watch is not None

    def unbegun(self) -> GenerationResult:
        """What a request has that never got a slot: what it came with."""
        generated = self.request.generated or GeneratedTokens((), (), ())
        return GenerationResult(
            self.request.request_id,
            generated.token_ids,
            generated.logprobs,
            generated.token_versions,
            FinishReason.PREEMPTED,
            kept_ids=generated.kept_ids,
        )

    def completes_stop(self, token: int) -> bool:
        """Whether the next token of the response makes its text contain a stop string."""
        self.stop_string = None if self.watch is None else self.watch.push(token)
        return self.stop_string is not None

    def result(
        self,
        token_ids: list[int],
        logprobs: list[float],
        at_stop_token: bool,
        kept_ids: tuple[NDArray[np.int32], ...] = (),
        *,
        ended: bool = True,
    ) -> GenerationResult:
        """What `generate` returns; a response that has not `ended` is given back."""
        stop_string = None if at_stop_token else self.stop_string
        stopped = at_stop_token or stop_string is not None
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerationResult(
            request_id=self.request.request_id,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            token_versions=self._versions(len(token_ids)),
            finish_reason=reason if ended else FinishReason.PREEMPTED,
            stop_string=stop_string,
            kept_ids=kept_ids,
        )

    def _versions(self, count: int) -> tuple[int, ...]:
        ends = [start for start, _ in self.version_marks[1:]] + [count]
        versions = [] if self.request.generated is None else list(self.request.generated.token_versions)
        for (start, version), end in zip(self.version_marks, ends, strict=True):
            versions += [version] * (end - start)
        return tuple(versions)


_MIN_TEMPERATURE = 1e-3
"""Below it, logits over the temperature leave the range of float32."""


def check_request(request: GenerationRequest, max_model_len: int, vocabulary: int) -> None:
    """Refuse what cannot be served, before it can disturb the requests that share the batch."""
    prompt, sampling, name = request.prompt_ids, request.sampling, request.request_id
    if not prompt:
        raise InvalidRequest(f"request {name}: the prompt is empty; it needs at least one token")
    if len(prompt) >= max_model_len:
        raise PromptTooLong(
            f"request {name}: the prompt has {len(prompt)} tokens, which leaves no room for a response in the engine's "
            f"context of {max_model_len} (rollout.engine.max_model_len)"
        )
    _check_generated(request, max_model_len, vocabulary)
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise InvalidRequest(f"request {name}: the prompt has a token outside the vocabulary 0..{vocabulary - 1}")
    for wrong, what in (
        (sampling.max_new_tokens < 1, f"max_new_tokens must be at least 1, not {sampling.max_new_tokens}"),
        (
            sampling.temperature != 0.0 and not _MIN_TEMPERATURE <= sampling.temperature < float("inf"),
            f"temperature must be 0 or at least {_MIN_TEMPERATURE}, not {sampling.temperature}",
        ),
        (not 0.0 < sampling.top_p <= 1.0, f"top_p must be in (0, 1], not {sampling.top_p}"),
        (not 0 <= sampling.top_k < 2**31, f"top_k must be from 0 to 2**31 - 1, not {sampling.top_k}"),
        (not 0.0 <= sampling.min_p <= 1.0, f"min_p must be in [0, 1], not {sampling.min_p}"),
        (
            any(not 0 <= token < vocabulary for token in sampling.stop_token_ids),
            f"stop_token_ids has a token outside the vocabulary 0..{vocabulary - 1}",
        ),
        *((wrong_stop(stop) is not None, f"stop string {stop!r} {wrong_stop(stop)}") for stop in sampling.stop),
    ):
        if wrong:
            raise InvalidRequest(f"request {name}: {what}")


def _check_generated(request: GenerationRequest, max_model_len: int, vocabulary: int) -> None:
    generated, name = request.generated, request.request_id
    if generated is None:
        return
    count, room = len(generated.token_ids), max_model_len - len(request.prompt_ids)
    for wrong, what in (
        (not count, "has no token"),
        (len(generated.logprobs) != count or len(generated.token_versions) != count, "has lists of unequal length"),
        (len(generated.kept_ids) not in (0, count), "does not say for every token what it was drawn from"),
        (count >= min(request.sampling.max_new_tokens, room), f"is whole already, with {count} tokens"),
        (any(not 0 <= token < vocabulary for token in generated.token_ids), "has a token outside the vocabulary"),
    ):
        if wrong:
            raise InvalidRequest(f"request {name}: what was generated already {what}")

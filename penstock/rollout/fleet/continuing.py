"""A request that comes back unfinished goes on elsewhere."""

from __future__ import annotations

from dataclasses import replace

from penstock.rollout.engines.base import FinishReason, GeneratedTokens, GenerationRequest, GenerationResult


def continued(request: GenerationRequest, given_back: GenerationResult, *, anew: bool) -> GenerationRequest:
    """The request for the next rank: with the tokens it has, or, with `anew`, as it was at first.

    A run whose results must not depend on timing begins anew: keys and values that are computed again from tokens are
    equal to those computed token by token only up to rounding.
    """
    assert given_back.finish_reason is FinishReason.PREEMPTED
    if anew or not given_back.token_ids:
        return request
    generated = GeneratedTokens(
        given_back.token_ids, given_back.logprobs, given_back.token_versions, given_back.kept_ids
    )
    return replace(request, generated=generated)

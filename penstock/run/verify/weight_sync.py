"""Weight sync round trip: changed weights reach the engine bit for bit, and the original ones come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from penstock.rollout.engines.base import GenerationEngine, GenerationRequest, GenerationResult
from penstock.run.verify.findings import Check, Finding, NotChecked, Status, within
from penstock.run.verify.seen_prompt import asked_prompts
from penstock.run.verify.subject import Subject
from penstock.weights.digest import published_digests
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.publisher import WeightPublisher
from penstock.weights.site import site_of
from penstock.weights.synchronizer import WeightSynchronizer
from penstock.weights.transports.opening import open_weights

_PROBES, _PROBE_TOKENS = 4, 16
_LOGPROB_BARS = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 1e-2}
"""The probes are generated alone and in the same order, so differences of even this size are not expected."""

WEIGHT_SYNC = Check(
    "weight_sync",
    "weight sync",
    (
        "ranks",
        "tensors",
        "wrong",
        "first_wrong",
        "unrestored",
        "unchanged_generation",
        "probe_tokens",
        "probe_tokens_changed",
        "probe_logprob_difference",
        "pause_seconds",
    ),
    "The engine does not serve the weights that the trainer publishes: from the first step on, rollouts would come "
    "from a different policy than the one being trained. Please report the model family and the engine.",
)


@runtime_checkable
class DigestingEngine(Protocol):
    """An engine that can report which weights it serves."""

    async def weight_digests(self) -> dict[str, str]:
        """A hash of every weight, by its Hugging Face name."""


@dataclass(frozen=True)
class _Served:
    """What an engine serves: its weights' hashes, and greedy responses to the probes."""

    digests: Mapping[str, str]
    responses: tuple[GenerationResult, ...]


async def check_weight_sync(subject: Subject) -> Finding:
    """Publish weights that differ in every tensor, compare hashes, publish the real ones again, compare everything."""
    with contextlib.closing(WeightPublisher()) as publisher:
        return await _compared(subject, publisher)


async def _compared(subject: Subject, publisher: WeightPublisher) -> Finding:
    engines, trainer = subject.serving.engines, subject.training.trainer
    synchronizer = WeightSynchronizer(engines.receivers)
    prompts = await asked_prompts(subject, _PROBES)
    sites = [*synchronizer.sites(), site_of()]
    original = await trainer.publish_weights(sites)
    changed = await asyncio.to_thread(_publish_changed, publisher, original, sites)
    before = await _served_by_all(subject, prompts)
    try:
        report = await synchronizer.publish(changed)
        meanwhile = await _served_by_all(subject, prompts)
    finally:
        await synchronizer.publish(original)
    after = await _served_by_all(subject, prompts)
    wrong = _differing(await asyncio.to_thread(published_digests, changed), meanwhile)
    unrestored = _differing(await asyncio.to_thread(published_digests, original), after)
    await trainer.release_weights(original)
    # Every rank before and after, and every rank against the first.
    pairs = [
        *(pair for one, other in zip(before, after, strict=True) for pair in _pairs(one, other)),
        *(pair for other in after[1:] for pair in _pairs(after[0], other)),
    ]
    figures = {
        "ranks": len(after),
        "tensors": sum(len(served.digests) for served in meanwhile),
        "wrong": len(wrong),
        "first_wrong": next(iter([*wrong, *unrestored]), None),
        "unrestored": len(unrestored),
        "unchanged_generation": sum(
            _logprobs(one) == _logprobs(other) for one, other in zip(before, meanwhile, strict=True)
        ),
        "probe_tokens": sum(len(one.token_ids) for one, _ in pairs),
        "probe_tokens_changed": sum(_changed_tokens(one, other) for one, other in pairs),
        "probe_logprob_difference": max(_logprob_gap(one, other) for one, other in pairs),
        "pause_seconds": report.pause_seconds,
    }
    return _judged(figures, subject.config.model.dtype)


def _judged(figures: dict[str, Any], dtype: str) -> Finding:
    bars = {
        "wrong": 0,
        "unrestored": 0,
        "unchanged_generation": 0,
        "probe_tokens_changed": 0,
        "probe_logprob_difference": _LOGPROB_BARS[dtype],
    }
    problems = []
    if figures["wrong"] or figures["unrestored"]:
        problems.append(
            f"{figures['wrong']} of {figures['tensors']} tensors are not what was published, {figures['unrestored']} "
            f"after the original weights were published again; first: {figures['first_wrong']}."
        )
    if figures["unchanged_generation"]:
        problems.append("The engine generated the same log-probs under changed weights: it does not use them.")
    if not within(figures, {name: bars[name] for name in ("probe_tokens_changed", "probe_logprob_difference")}):
        problems.append(
            f"Greedy responses differ from those before in {figures['probe_tokens_changed']} of "
            f"{figures['probe_tokens']} tokens (log-probs by up to {figures['probe_logprob_difference']:.1e})."
        )
    shown = (
        f"{figures['wrong']} of {figures['tensors']} tensors wrong, "
        f"{figures['probe_tokens_changed']} of {figures['probe_tokens']} tokens changed"
    )
    return Finding(Status.FAIL if problems else Status.PASS, shown, figures, bars, "none", " ".join(problems))


def _changed(tensor: Tensor) -> Tensor:
    """The tensor with nearly every number changed in any dtype, and none by enough to overflow."""
    return tensor * (1 + 2**-6) + 2**-10


def _publish_changed(
    publisher: WeightPublisher, original: WeightPublication, sites: list[WeightSite]
) -> WeightPublication:
    opened = open_weights(original, site_of())
    tensors = [(name, _changed(tensor)) for name, tensor in opened.tensors()]
    opened.close()
    return publisher.publish(original.version + 1, PolicyWeights.given(tensors), sites)


async def _served_by_all(subject: Subject, prompts: list[tuple[int, ...]]) -> list[_Served]:
    return [await _served(subject, rank.engine, prompts) for rank in subject.serving.engines.ranks]


async def _served(subject: Subject, engine: GenerationEngine, prompts: list[tuple[int, ...]]) -> _Served:
    sampling = subject.serving.sampling
    if not isinstance(engine, DigestingEngine):
        raise NotChecked(f"{type(engine).__name__} cannot report the hashes of its weights")
    tokens = min(_PROBE_TOKENS, sampling.max_new_tokens)
    greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, max_new_tokens=tokens, stop=())
    responses = [
        await engine.generate(GenerationRequest(f"verify-probe{index}", prompt, greedy))
        for index, prompt in enumerate(prompts)
    ]
    return _Served(await engine.weight_digests(), tuple(responses))


def _differing(wanted: Mapping[str, str], ranks: Sequence[_Served]) -> list[str]:
    """The names of wrong tensors, of each rank."""
    return [
        name
        for served in ranks
        for name in sorted(wanted.keys() | served.digests.keys())
        if wanted.get(name) != served.digests.get(name)
    ]


def _pairs(one: _Served, other: _Served) -> list[tuple[GenerationResult, GenerationResult]]:
    return list(zip(one.responses, other.responses, strict=True))


def _logprobs(served: _Served) -> list[tuple[float, ...]]:
    return [response.logprobs for response in served.responses]


def _changed_tokens(one: GenerationResult, other: GenerationResult) -> int:
    length = max(len(one.token_ids), len(other.token_ids))
    return length - sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=False))


def _logprob_gap(one: GenerationResult, other: GenerationResult) -> float:
    return max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=False)), default=0.0)

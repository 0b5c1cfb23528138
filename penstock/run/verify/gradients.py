"""Gradient parity: a streamed step must have the gradients of the whole batch in one call.

Raw gradients are accumulated on the run's own trainer with `begin_train_step` and `train_microbatch`, read, and dropped
with `abort_train_step`: no optimizer runs, and the weights are hashed before and after.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from penstock.controller.pumps.advantage import AdvantagePump
from penstock.data_plane import fields
from penstock.data_plane.meta import KVBatchMeta
from penstock.run.verify.findings import Check, Finding, NotChecked, Status, within
from penstock.run.verify.subject import Subject
from penstock.training.gradient_comparison import ComparesGradients
from penstock.training.targets import needs_preparation
from penstock.weights.digest import published_digests
from penstock.weights.site import site_of

R = TypeVar("R")

BARS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}
"""Relative difference by dtype. In bf16 every pass rounds its gradient to 8 bits, and another partition rounds
differently: the bar finds mistakes in the math, not small rounding errors."""
_STEP = 0
_SEED = 0

GRADIENTS = Check(
    "gradient_parity",
    "gradient parity",
    (
        "streamed_relative_difference",
        "by_group_relative_difference",
        "worst_parameter",
        "gradient_norm",
        "groups",
        "streamed_chunks",
        "tokens",
        "counts_differ",
        "weights_changed",
        "random_advantages",
    ),
    "Streaming would not train the same thing as the whole batch. Set training.min_groups_per_chunk to "
    "training.prompt_groups_per_step to train whole batches, and please report the model family: it mixes the rows of "
    "a batch, or its loss depends on how rows are split into microbatches.",
)


@dataclass(frozen=True)
class _Accumulated(Generic[R]):
    """What one way of splitting the batch gave: the step's counts, and what was read from its gradients."""

    tokens: float
    sequences: float
    read: R

    @property
    def counts(self) -> tuple[float, float]:
        """What the loss may be divided by."""
        return self.tokens, self.sequences


@dataclass(frozen=True)
class _Batch:
    """What the gradients are taken of."""

    metas: tuple[KVBatchMeta, ...]
    """One per group."""
    random_advantages: bool
    notes: tuple[str, ...]


async def check_gradients(subject: Subject) -> Finding:
    """Streamed as the run would split it, and group by group, against the whole batch."""
    batch = await _scored(subject)
    metas = batch.metas
    size = min(subject.config.training.min_groups_per_chunk, len(metas))
    before = await _weight_digests(subject)
    trainer = subject.training.trainer
    if not isinstance(trainer, ComparesGradients):
        raise NotChecked(f"{type(trainer).__name__} does not compare gradients")
    try:
        whole = await _accumulate(subject, _chunks(metas, len(metas)), trainer.keep_gradients)
        streamed = await _accumulate(subject, _chunks(metas, size), trainer.gradient_difference)
        by_group = streamed if size == 1 else await _accumulate(subject, _chunks(metas, 1), trainer.gradient_difference)
    finally:
        await trainer.forget_gradients()
    after = await _weight_digests(subject)
    gap, group_gap = streamed.read.relative, by_group.read.relative
    worst = by_group.read if group_gap > gap else streamed.read
    figures = {
        "streamed_relative_difference": gap,
        "by_group_relative_difference": group_gap,
        "worst_parameter": worst.worst_parameter,
        "gradient_norm": whole.read,
        "groups": len(subject.sampled.groups),
        "streamed_chunks": -(-len(metas) // size),
        "tokens": whole.tokens,
        "counts_differ": sum(other.counts != whole.counts for other in (streamed, by_group)),
        "weights_changed": sum(before[name] != after.get(name) for name in before),
        "random_advantages": batch.random_advantages,
    }
    loss = subject.config.algorithm.loss
    own_loss = loss.import_path if loss.kind == "custom" else None
    return _judged(figures, subject.config.model.dtype, batch.notes, own_loss)


def _judged(figures: dict[str, Any], dtype: str, notes: tuple[str, ...], own_loss: str | None = None) -> Finding:
    bar = BARS[dtype]
    differences = {"streamed_relative_difference": bar, "by_group_relative_difference": bar}
    problems = []
    if figures["gradient_norm"] == 0:
        problems.append("The whole batch has no gradient at all.")
    elif not within(figures, differences):
        problems.append(f"Gradients differ, most in {figures['worst_parameter']}.")
        if own_loss is not None:
            problems.append(
                f"Look at algorithm.loss.import_path = {own_loss} first: the loss of a token may depend on its own "
                "response only, not on what else is in the batch."
            )
    if figures["counts_differ"]:
        problems.append("The chunks' valid tokens or sequences do not add up to those of the whole batch.")
    if figures["weights_changed"]:
        problems.append(f"{figures['weights_changed']} weights changed although the step was aborted.")
    shown = (
        f"{figures['streamed_relative_difference']:.1e} streamed in {figures['streamed_chunks']} chunks, "
        f"{figures['by_group_relative_difference']:.1e} group by group"
    )
    status = Status.FAIL if problems else Status.PASS
    bars = differences | {"counts_differ": 0, "weights_changed": 0}
    return Finding(status, shown, figures, bars, f"at most {bar:.0e} in {dtype}", " ".join(problems), notes)


async def _scored(subject: Subject) -> _Batch:
    """The groups with the configured algorithm's advantages, or random ones if those are all zero."""
    meta, notes = subject.sampled.meta, list[str]()
    if needs_preparation(subject.config.algorithm, subject.config.training):
        meta = (await subject.training.trainer.prepare(meta)).meta
    async with _scoring(subject) as pump:
        scored = await pump.submit(meta)
    ready = scored.meta
    random = not bool((scored.advantages_S * scored.mask_S).any())
    if random:
        notes.append("all advantages are 0 (no reward spread), so this check uses random advantages with a fixed seed")
        await _draw_advantages(subject, meta)
        ready = replace(ready, tags=meta.tags)  # no row is masked out any more
    # The rows of one group are neighbours.
    starts = [0, *itertools.accumulate(len(group) for group in subject.sampled.groups)]
    metas = tuple(ready.slice(start, stop) for start, stop in itertools.pairwise(starts))
    if len(metas) == 1:
        metas = tuple(ready.slice(row, row + 1) for row in range(len(ready)))
        notes.append("there is only one group, so its responses are used as groups")
    return _Batch(metas, random, tuple(notes))


async def _draw_advantages(subject: Subject, meta: KVBatchMeta) -> None:
    """Normal advantages for all rows, masked out or not."""
    noise_S = torch.randn(len(meta), generator=torch.Generator().manual_seed(_SEED))
    columns = {fields.ADVANTAGE: noise_S, fields.SAMPLE_MASK: torch.ones(len(meta))}
    await subject.data_plane.put_samples_async(meta.sample_ids, columns, meta.partition_id)


@asynccontextmanager
async def _scoring(subject: Subject) -> AsyncIterator[AdvantagePump]:
    config = subject.config
    pump = AdvantagePump(subject.data_plane, config.algorithm, config.rollout.sampling.max_new_tokens)
    running = asyncio.create_task(pump.run())
    try:
        yield pump
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _accumulate(
    subject: Subject, chunks: Sequence[KVBatchMeta], read: Callable[[], Awaitable[R]]
) -> _Accumulated[R]:
    """Open a step, feed it the chunks, have something read from its gradients, drop it."""
    trainer = subject.training.trainer
    await trainer.begin_train_step(_STEP)
    try:
        results = [await trainer.train_microbatch(_STEP, chunk) for chunk in chunks]
        found = await read()
    finally:
        await trainer.abort_train_step(_STEP)
    tokens, sequences = (sum(getattr(r, name) for r in results) for name in ("valid_tokens", "valid_sequences"))
    return _Accumulated(tokens, sequences, found)


def _chunks(metas: Sequence[KVBatchMeta], size: int) -> list[KVBatchMeta]:
    return [KVBatchMeta.concat(metas[start : start + size]) for start in range(0, len(metas), size)]


async def _weight_digests(subject: Subject) -> dict[str, str]:
    trainer = subject.training.trainer
    publication = await trainer.publish_weights([site_of()])
    try:
        return await asyncio.to_thread(published_digests, publication)
    finally:
        await trainer.release_weights(publication)

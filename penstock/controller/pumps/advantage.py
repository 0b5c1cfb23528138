"""The advantage pump: reads the small columns of selected groups, writes a per-sample advantage."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace
from dataclasses import fields as attributes

import torch
from torch import Tensor

from penstock.algorithms.rewards import has_spread
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.controller.pumps.estimators import Scores, estimate_advantages, load_estimator, shaped_rewards
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column
from penstock.data_plane.meta import KVBatchMeta
from penstock.observe.timeline import Timeline
from penstock.training.targets import kl_in_reward, needs_kl_sums

_SMALL_COLUMNS = (fields.REWARD, fields.RESPONSE_LENGTH, fields.TRUNCATED, fields.SAMPLE_MASK)
_KL_COLUMNS = (fields.KL_TO_GO_SUM, fields.KL_TO_GO_SQUARE_SUM)


@dataclass(frozen=True)
class ScoredChunk:
    """A chunk that is ready to train, and what the controller knows of its samples (`S` = samples)."""

    meta: KVBatchMeta
    rewards_S: Tensor
    """As the environment gave them."""
    judged_S: Tensor
    """Scaled and clipped: what tells a better response from a worse one, regardless of length."""
    shaped_S: Tensor
    """After all of `algorithm.reward`."""
    lengths_S: Tensor
    truncated_S: Tensor
    advantages_S: Tensor
    mask_S: Tensor
    """0 for samples that are not trained."""

    @property
    def valid_tokens(self) -> float:
        """Trained tokens in the chunk: response lengths of samples that are not masked out."""
        return float((self.lengths_S * self.mask_S).sum())

    def untrained_groups(self) -> tuple[str, ...]:
        """Groups in which no token is trained because all samples are masked out."""
        tokens_S = self.lengths_S * self.mask_S
        groups = zip(self.meta.group_ids, rows_by_group(self.meta), strict=True)
        return tuple(group for group, rows in groups if not bool(tokens_S[rows].any()))

    def flat_groups(self) -> tuple[str, ...]:
        """Groups that say nothing about which response is better: all rewards the same, or no sample trained.

        A penalty for length does not count: among answers that are all wrong it would make the shortest a good one.
        """
        untrained = self.untrained_groups()
        groups = zip(self.meta.group_ids, rows_by_group(self.meta), strict=True)
        return tuple(group for group, rows in groups if group in untrained or not bool(has_spread(self.judged_S[rows])))

    def without(self, groups: Collection[str]) -> ScoredChunk:
        """The chunk without some groups."""
        kept = [row for row, sample in enumerate(self.meta.sample_ids) if fields.group_of(sample) not in groups]
        columns = {f.name: getattr(self, f.name)[kept] for f in attributes(self) if f.name != "meta"}
        return replace(self, meta=self.meta.subset(kept), **columns)


class AdvantagePump:
    """A queue of chunks in, advantages in the data plane out. Groups are told apart by their ids, never by text.

    `longest_response` is the maximum length of a response in tokens.
    """

    def __init__(
        self,
        data_plane: DataPlaneClient,
        algorithm: AlgorithmConfig,
        longest_response: int,
        timeline: Timeline | None = None,
    ) -> None:
        self._data_plane = data_plane
        self._algorithm = algorithm
        self._custom = load_estimator(algorithm)
        self._longest = longest_response
        self._track = (timeline or Timeline.off()).track("controller", "advantage pump")
        self._inbox: asyncio.Queue[tuple[KVBatchMeta, asyncio.Future[ScoredChunk]]] = asyncio.Queue()
        self.waiting_for = "start"
        """For diagnosis: what the pump waits for now."""

    def submit(self, meta: KVBatchMeta) -> asyncio.Future[ScoredChunk]:
        """Queue a chunk; chunks are scored in order."""
        scored: asyncio.Future[ScoredChunk] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait((meta, scored))
        return scored

    async def run(self) -> None:
        """Score chunks until cancelled; errors and cancellation go to whoever submitted the chunk."""
        try:
            await self._run()
        finally:
            while not self._inbox.empty():
                self._inbox.get_nowait()[1].cancel()

    async def _run(self) -> None:
        while True:
            self.waiting_for = "a chunk"
            self._track.switch("waiting for a chunk")
            meta, scored = await self._inbox.get()
            self.waiting_for = f"columns of {len(meta.group_ids)} groups in the data plane"
            self._track.switch("scoring a chunk", groups=len(meta.group_ids))
            try:
                result = await self._score(meta)
            except Exception as error:  # noqa: BLE001 - handed to the submitter
                if not scored.done():
                    scored.set_exception(error)
            except asyncio.CancelledError:
                scored.cancel()
                raise
            else:
                if not scored.done():
                    scored.set_result(result)

    async def _score(self, meta: KVBatchMeta) -> ScoredChunk:
        algorithm = self._algorithm
        wanted = _SMALL_COLUMNS + (_KL_COLUMNS if needs_kl_sums(algorithm) else ())
        batch = await self._data_plane.get_samples_async(meta, wanted)
        rewards_S, lengths_S, truncated_S, mask_S = (batch.tensor(name) for name in _SMALL_COLUMNS)
        judged_S, shaped_S = shaped_rewards(algorithm, rewards_S, lengths_S, self._longest)
        if algorithm.reward.overlong == "mask":
            mask_S = mask_S * ~truncated_S
        scores = self._scores(batch, shaped_S, lengths_S * (mask_S > 0), meta)
        advantages_S, kl_weight = estimate_advantages(algorithm, scores, self._custom)
        written: dict[str, Column] = {fields.ADVANTAGE: advantages_S.to(torch.float32)}
        if algorithm.reward.overlong == "mask":
            written[fields.SAMPLE_MASK] = mask_S
        if kl_in_reward(algorithm):
            written[fields.KL_WEIGHT] = torch.full_like(advantages_S, kl_weight, dtype=torch.float64)
        await self._data_plane.put_samples_async(meta.sample_ids, written, meta.partition_id)
        if algorithm.reward.overlong == "mask":
            meta = _masked(meta, mask_S)
        return ScoredChunk(
            meta.with_fields(*written), rewards_S, judged_S, shaped_S, lengths_S, truncated_S, advantages_S, mask_S
        )

    def _scores(self, batch: SampleBatch, shaped_S: Tensor, lengths_S: Tensor, meta: KVBatchMeta) -> Scores:
        kl = [batch.tensor(name) for name in _KL_COLUMNS] if needs_kl_sums(self._algorithm) else [None, None]
        return Scores(shaped_S, lengths_S, rows_by_group(meta), *kl)


def _masked(meta: KVBatchMeta, mask_S: Tensor) -> KVBatchMeta:
    """What rows with this mask still have of valid tokens; a row whose tokens were never counted stays so."""
    rows = zip(meta.tags, mask_S.tolist(), strict=True)
    return replace(meta, tags=tuple({**tags, fields.VALID_TOKENS: 0} if mask == 0 else tags for tags, mask in rows))


def rows_by_group(meta: KVBatchMeta) -> list[list[int]]:
    """The rows of each group, groups in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for row, sample in enumerate(meta.sample_ids):
        groups.setdefault(fields.group_of(sample), []).append(row)
    return list(groups.values())

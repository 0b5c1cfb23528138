"""The advantage pump: reads the small columns of selected groups, writes a per-sample advantage."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.advantages import grpo_advantages
from penstock.config.algorithm import GrpoAdvantage
from penstock.data_plane import fields
from penstock.data_plane.client import DataPlaneClient
from penstock.data_plane.meta import KVBatchMeta

_SMALL_COLUMNS = (fields.REWARD, fields.RESPONSE_LENGTH, fields.TRUNCATED, fields.SAMPLE_MASK)


@dataclass(frozen=True)
class ScoredChunk:
    """A chunk that is ready to train, and what the controller knows of its samples (`S` = samples)."""

    meta: KVBatchMeta
    rewards_S: Tensor
    lengths_S: Tensor
    truncated_S: Tensor
    advantages_S: Tensor
    valid_tokens: float
    """Trained tokens in the chunk: response lengths of samples that are not masked out."""


class AdvantagePump:
    """A queue of chunks in, advantages in the data plane out. Groups are told apart by their ids, never by text."""

    def __init__(self, data_plane: DataPlaneClient, config: GrpoAdvantage) -> None:
        self._data_plane = data_plane
        self._config = config
        self._inbox: asyncio.Queue[tuple[KVBatchMeta, asyncio.Future[ScoredChunk]]] = asyncio.Queue()

    def submit(self, meta: KVBatchMeta) -> asyncio.Future[ScoredChunk]:
        """Queue a chunk; chunks are scored in order."""
        scored: asyncio.Future[ScoredChunk] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait((meta, scored))
        return scored

    async def run(self) -> None:
        """Score chunks until cancelled; an error goes to whoever submitted the chunk."""
        while True:
            meta, scored = await self._inbox.get()
            try:
                result = await self._score(meta)
            except Exception as error:  # noqa: BLE001 - handed to the submitter
                if not scored.done():
                    scored.set_exception(error)
            else:
                if not scored.done():
                    scored.set_result(result)

    async def _score(self, meta: KVBatchMeta) -> ScoredChunk:
        batch = await self._data_plane.get_samples_async(meta, _SMALL_COLUMNS)
        rewards_S, lengths_S, truncated_S, mask_S = (batch.tensor(name) for name in _SMALL_COLUMNS)
        advantages_S = torch.empty_like(rewards_S)
        for rows in _rows_by_group(meta):
            advantages_S[rows] = grpo_advantages(
                rewards_S[rows], normalize_std=self._config.normalize_std, epsilon=self._config.epsilon
            )
        await self._data_plane.put_samples_async(meta.sample_ids, {fields.ADVANTAGE: advantages_S}, meta.partition_id)
        valid = float((lengths_S * mask_S).sum())
        return ScoredChunk(meta.with_fields(fields.ADVANTAGE), rewards_S, lengths_S, truncated_S, advantages_S, valid)


def _rows_by_group(meta: KVBatchMeta) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for row, sample in enumerate(meta.sample_ids):
        groups.setdefault(fields.group_of(sample), []).append(row)
    return list(groups.values())

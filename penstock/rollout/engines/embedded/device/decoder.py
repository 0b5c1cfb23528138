"""What decoding keeps on the device, and the calls that enqueue work there without waiting for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import EngineError
from penstock.rollout.engines.embedded.device import row_kernels, sampling_kernels
from penstock.rollout.engines.embedded.device.graphs import StepGraphs, size_of, sizes_for
from penstock.rollout.engines.embedded.device.layers import CacheCells, DeviceModel, Prefixes
from penstock.rollout.engines.embedded.prefills import Prefix
from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.rollout.engines.embedded.sampling import KeptIds, SamplingPlan, truncate

_PREFILL_TOKENS = 16384
"""Packed tokens of one prefill forward, at most; a single longer prefix goes alone."""
_TRUNCATED_ROWS = 32
"""Rows whose logits are sorted at a time, to bound the memory that takes."""


@dataclass(frozen=True)
class Flight:
    """An enqueued decode step: which slots it is for, and where its outcome arrives."""

    slots_B: NDArray[np.int32]
    _drawn_2S: Tensor
    _arrived: torch.cuda.Event | None
    _kept_RW: Tensor | None = None
    """Eight tokens of the vocabulary a byte: what truncation left of the distributions of `_truncated_R`."""
    _truncated_R: tuple[int, ...] = ()

    def wait(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and log-probs of its rows."""
        if self._arrived is not None:
            self._arrived.synchronize()
        drawn_2B = self._drawn_2S.numpy()[:, : self.slots_B.shape[0]]
        return drawn_2B[0].astype(np.int64), drawn_2B[1].view(np.float32).copy()

    def kept(self) -> KeptIds:
        """What the tokens of truncated distributions were drawn from, by row; after `wait`."""
        if self._kept_RW is None:
            return {}
        return {row: _set_bits(kept_W) for row, kept_W in zip(self._truncated_R, self._kept_RW.numpy(), strict=True)}


class DeviceDecoder:
    """Decode steps and prefills on the slots of a runner's cache, in the order of the calls.

    A step reads each slot's pending token from the device and leaves the next one there, so steps can be enqueued
    without waiting for each other. Rows are the slots that take part, in any order; they are padded to the next size
    that has a graph.

    Invariant: at most two flights are unread, since outcomes have two places to arrive.

    Worked example: `prefill` of [5, 6] to slot 3; `seat` slot 3 with token 7 at position 2; `launch([3])` draws a token
    and leaves it pending at position 3; a second `launch([3])` continues from it before the first flight's `wait`.
    """

    def __init__(self, runner: ModelRunner, *, graphs: bool) -> None:
        self._runner, self._graphs = runner, StepGraphs(runner.device, capture=graphs)
        self.attach_weights()
        self.allocate()

    @property
    def graphs(self) -> StepGraphs:
        """For tests and messages."""
        return self._graphs

    def attach_weights(self) -> None:
        """Take hold of the model's weights."""
        self._model: DeviceModel | None = DeviceModel(self._runner.lm, self._runner.max_model_len)

    def release_weights(self) -> None:
        """Let go of the weights, which are about to be freed."""
        self._graphs.clear()
        self._model = None

    def allocate(self) -> None:
        """Take the memory, next to that of the runner's cache."""
        slots, device = self._runner.slots, self._runner.device
        self._state = sampling_kernels.SamplingState.empty(slots, device)
        self._slots_S = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self._seated_S = np.full(slots, -1, dtype=np.int32)
        weight_VH = self._runner.lm.head_weight_VH
        self._logits_SV = torch.empty((slots, self._runner.vocabulary), dtype=weight_VH.dtype, device=device)
        self._drawn_2S = torch.zeros((2, slots), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._arrivals = [torch.zeros((2, slots), dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        with self._here():  # all rows are still padding, so a step writes nothing
            self._graphs.prepare([slots] if self._runner.deterministic else sizes_for(slots), self._forward)

    def free(self) -> None:
        """Give the memory back; `allocate` before the next use."""
        self._graphs.clear()
        nothing = torch.empty(0)
        self._state = sampling_kernels.SamplingState(nothing, nothing, nothing, nothing)
        self._slots_S = self._logits_SV = self._drawn_2S = nothing
        self._arrivals = []

    # Prefill

    def prefill(self, prefixes: Sequence[Prefix], slots: Sequence[int]) -> None:
        """Compute the keys and values of each prefix (at least one token) into its slot."""
        for chunk in _packed([len(prefix) for prefix in prefixes], alone=self._runner.deterministic):
            with self._here():
                self._prefill_packed([prefixes[p] for p in chunk], [slots[p] for p in chunk])

    def _prefill_packed(self, prefixes: list[Prefix], slots: list[int]) -> None:
        lengths_P = np.array([len(prefix) for prefix in prefixes], dtype=np.int32)
        starts_P = np.cumsum(lengths_P, dtype=np.int32) - lengths_P
        slots_P = np.array(slots, dtype=np.int32)
        total = int(lengths_P.sum())
        columns_3T = np.empty((3, total), dtype=np.int32)
        columns_3T[0] = np.concatenate([np.array(prefix, dtype=np.int32) for prefix in prefixes])
        columns_3T[1] = np.arange(total, dtype=np.int32) - np.repeat(starts_P, lengths_P)
        columns_3T[2] = np.repeat(slots_P, lengths_P)
        tokens_T, positions_T, slots_T = self._upload(columns_3T)
        slots_on_P, starts_on_P, lengths_on_P = self._upload(np.stack((slots_P, starts_P, lengths_P)))
        packed = Prefixes(slots_on_P, starts_on_P, lengths_on_P, int(lengths_P.max()))
        self.model.prefill(tokens_T, CacheCells(slots_T, positions_T), packed, self._runner.cache.kv_ZSKCD)

    def copy_prefixes(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """`(source, target, length)`: copy a slot's first positions to another slot."""
        with self._here():
            sources_R, targets_R, lengths_R = self._upload(np.array(copies, dtype=np.int32).T.copy())
            row_kernels.copy_prefixes(self._runner.cache.kv_ZSKCD, sources_R, targets_R, lengths_R)

    def seat(
        self,
        slots_B: NDArray[np.int32],
        feed_2B: NDArray[np.int64],
        temperature_B: NDArray[np.float32],
        seeds_B: NDArray[np.int64],
    ) -> None:
        """Give slots their pending token and its position, temperature and seed."""
        at_B = self._upload(slots_B.astype(np.int64))
        token_B, position_B = self._upload(feed_2B.astype(np.int32))
        self._state.token_S[at_B] = token_B
        self._state.position_S[at_B] = position_B
        self._state.temperature_S[at_B] = self._upload(temperature_B.copy())
        self._state.seed_S[at_B] = self._upload(seeds_B)

    # Decode

    @property
    def model(self) -> DeviceModel:
        """The model's arithmetic."""
        if self._model is None:
            raise EngineError("the weights are not in memory")
        return self._model

    def launch(self, slots_B: NDArray[np.int32], truncation: SamplingPlan | None = None) -> Flight:
        """Enqueue a decode step for these slots; `truncation` if one of them uses min-p, top-k or top-p."""
        slots = self._runner.slots
        size = slots if self._runner.deterministic else size_of(slots_B.shape[0], slots)
        with self._here():
            self._take_rows(slots_B)
            self._graphs.run(size, self._forward)
            kept_RW = None if truncation is None else _truncate_rows(self._logits_SV, truncation)
            sampling_kernels.sample(self._logits_SV[:size], self._slots_S[:size], self._state, self._drawn_2S)
            return self._depart(slots_B, kept_RW, () if truncation is None else truncation.rows_R)

    def hidden(self, slots_B: NDArray[np.int32]) -> Tensor:
        """The last hidden states of a step that draws nothing and leaves pending tokens pending, to check the model."""
        with self._here():
            self._take_rows(slots_B)
            return self._hidden(slots_B.shape[0])

    def logits(self, slots_B: NDArray[np.int32]) -> Tensor:
        """Likewise its logits; valid until the next step."""
        with self._here():
            self._take_rows(slots_B)
            self._forward(slots_B.shape[0])
            return self._logits_SV[: slots_B.shape[0]]

    def _take_rows(self, slots_B: NDArray[np.int32]) -> None:
        seated_S = np.full_like(self._seated_S, -1)
        seated_S[: slots_B.shape[0]] = slots_B
        if not np.array_equal(seated_S, self._seated_S):
            self._slots_S.copy_(self._upload(seated_S))
            self._seated_S = seated_S

    def _hidden(self, rows: int) -> Tensor:
        slots_B = self._slots_S[:rows]
        tokens_B, positions_B = row_kernels.gather(slots_B, self._state.token_S, self._state.position_S)
        return self.model.decode(tokens_B, CacheCells(slots_B, positions_B), self._runner.cache.kv_ZSKCD)

    def _forward(self, rows: int) -> None:
        self.model.logits(self._hidden(rows), self._logits_SV[:rows])

    def _depart(self, slots_B: NDArray[np.int32], kept_RW: Tensor | None, truncated_R: tuple[int, ...]) -> Flight:
        if kept_RW is not None and self._runner.device.type == "cuda":
            on_host_RW = torch.empty(kept_RW.shape, dtype=kept_RW.dtype, pin_memory=True)
            kept_RW = on_host_RW.copy_(kept_RW, non_blocking=True)
        arrival_2S = self._arrivals[0]
        self._arrivals.reverse()
        arrival_2S.copy_(self._drawn_2S, non_blocking=True)
        arrived = None
        if self._runner.device.type == "cuda":
            arrived = torch.cuda.current_stream(self._runner.device).record_event()
        return Flight(slots_B, arrival_2S, arrived, kept_RW, truncated_R)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        """To the device without waiting for what is enqueued there."""
        tensor = torch.from_numpy(array)
        if self._runner.device.type != "cuda":
            return tensor.clone()
        return tensor.pin_memory().to(self._runner.device, non_blocking=True)

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        """Kernels go to the current device, which in a new thread is the first one until it is set."""
        with torch.cuda.device(self._runner.device) if self._runner.device.type == "cuda" else contextlib.nullcontext():
            yield


def _truncate_rows(logits_SV: Tensor, plan: SamplingPlan) -> Tensor:
    """Make the tokens that min-p, top-k and top-p exclude impossible, in place; returns the others, eight per byte."""
    assert plan.truncated_R is not None
    parts = []
    for start in range(0, plan.truncated_R.shape[0], _TRUNCATED_ROWS):
        part = slice(start, start + _TRUNCATED_ROWS)
        rows_R = plan.truncated_R[part]
        logits_RV = logits_SV[rows_R]
        tempered_RV = logits_RV.float()
        if plan.temperature_B1 is not None:
            tempered_RV = tempered_RV / plan.temperature_B1[rows_R]
        gone_RV = truncate(tempered_RV, plan.part(part)) == -torch.inf
        logits_SV[rows_R] = logits_RV.masked_fill_(gone_RV, -torch.inf)
        parts.append(_as_bits(~gone_RV))
    return torch.cat(parts)


def _as_bits(flags_RV: Tensor) -> Tensor:
    """Eight flags per byte, lowest bit first; the last byte is padded with zeros."""
    padded_RV = torch.nn.functional.pad(flags_RV, (0, -flags_RV.shape[1] % 8))
    places_8 = 2 ** torch.arange(8, dtype=torch.uint8, device=flags_RV.device)
    return (padded_RV.view(flags_RV.shape[0], -1, 8) * places_8).sum(-1, dtype=torch.uint8)


def _set_bits(bits_W: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The places of the ones; only bytes that have any are taken apart."""
    at_X = np.flatnonzero(bits_W)
    byte_X, bit_X = np.nonzero(np.unpackbits(bits_W[at_X, None], axis=1, bitorder="little"))
    return (at_X[byte_X] * 8 + bit_X).astype(np.int32)


def _packed(lengths: list[int], *, alone: bool) -> list[list[int]]:
    """Indices of prefixes that go through one forward together; with `alone`, each by itself."""
    chunks: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if alone or length > room:
            chunks.append([])
            room = _PREFILL_TOKENS
        chunks[-1].append(index)
        room -= length
    return chunks

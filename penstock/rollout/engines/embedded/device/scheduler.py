"""Continuous batching with one decode step in flight: the host keeps its books while the device computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.engines.embedded.prefills import Prefix
from penstock.rollout.engines.embedded.requests import Ticket
from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.rollout.engines.embedded.sampling import KeptIds, SamplingPlan, plan_sampling
from penstock.rollout.engines.embedded.scheduler import PREFILL_ENTRIES, Scheduler

if TYPE_CHECKING:  # the decoder needs Triton; what is here does not
    from penstock.rollout.engines.embedded.device.decoder import DeviceDecoder, Flight


@dataclass(frozen=True)
class _Launch:
    """A step in flight, and how often each of its slots had changed hands when it was launched."""

    flight: Flight
    tenures_B: NDArray[np.int64]
    truncated: bool = False


class PipelinedScheduler(Scheduler):
    """A scheduler that enqueues a step before it has read the previous one.

    A response that reaches its length is known beforehand and is not launched again. One that draws a stop token is
    known a step late: its row computes one token too many, which nobody reads. A slot keeps its request's keys and
    values where they are; rows, which are contiguous, only name slots.

    Invariants: `_slot_S` is a permutation of the slots and `_row_S` its inverse; a launch's token belongs to the
    request in its slot if and only if the slot's tenure has not changed since.

    Worked example, one request of three tokens:

        step 1    launches the first token
        step 2    launches the second; reads the first
        step 3    launches the third; reads the second
        step 4    launches nothing, as the third is the last; reads it, and the response has ended
    """

    def __init__(self, runner: ModelRunner, version: int, decoder: DeviceDecoder) -> None:
        super().__init__(runner, version)
        self.decoder = decoder
        self._slot_S = np.arange(runner.slots, dtype=np.int32)
        self._row_S = np.arange(runner.slots, dtype=np.int32)
        self._tenure_S = np.zeros(runner.slots, dtype=np.int64)
        self._launched: _Launch | None = None
        self._truncation: tuple[NDArray[np.int64], SamplingPlan] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return super().has_work or self._launched is not None

    def drain(self) -> list[tuple[Ticket, GenerationResult]]:
        """Read the step in flight, so that host and device are at the same token."""
        launched, self._launched = self._launched, None
        return [] if launched is None else self._read(launched)

    def release_weights(self) -> None:
        """Let go of the weights, which are about to be freed."""
        super().release_weights()
        self.decoder.release_weights()

    def attach_weights(self) -> None:
        """Take hold of the weights again, now in new memory."""
        super().attach_weights()
        self.decoder.attach_weights()

    def free(self) -> None:
        """Give the memory for keys and values back, and what points to it."""
        self._launched = None
        self.decoder.free()
        super().free()

    def restore(self) -> None:
        """Take the memory again."""
        super().restore()
        self.decoder.allocate()

    # Seats

    def _seat(self, by_prefix: dict[Prefix, list[Ticket]]) -> None:
        first = self.rows.count
        self._fill_slots(by_prefix)
        for tickets in by_prefix.values():
            for ticket in tickets:
                ticket.version_marks.append((ticket.earlier, self.version))
                self.rows.add(ticket)
        new = slice(first, self.rows.count)
        seeds_B = np.array([_seed64(ticket.request.seed) for ticket in self.rows.tickets[new]], dtype=np.int64)
        self.decoder.seat(self._slot_S[new], self.rows.feed_2S[:, new], self.rows.temperature_S[new], seeds_B)
        self._truncation = None

    def _fill_slots(self, by_prefix: dict[Prefix, list[Ticket]]) -> None:
        """Put the keys and values of each prefix into the slots of its requests: the first slot's are computed, or
        already were, and the others get copies."""
        missing: list[tuple[Prefix, int]] = []
        copies: list[tuple[int, int, int]] = []
        row = self.rows.count
        for prefix, tickets in by_prefix.items():
            slot, *others = self._slot_S[row : row + len(tickets)].tolist()
            row += len(tickets)
            if not prefix:
                continue
            if (kv_ZKTD := self.prefills.get(prefix)) is not None:
                self.runner.cache.write_prefix(slot, 1, kv_ZKTD)
                self.counters.shared_prefills += 1
            else:
                missing.append((prefix, slot))
            copies += [(slot, other, len(prefix)) for other in others]
        if missing:
            self.decoder.prefill([prefix for prefix, _ in missing], [slot for _, slot in missing])
            for prefix, slot in missing[-PREFILL_ENTRIES:]:
                self.prefills.put(prefix, self.runner.cache.read_prefix(slot, len(prefix)))
            self.counters.prefills += len(missing)
            self.counters.prefill_tokens += sum(len(prefix) for prefix, _ in missing)
        if copies:
            self.decoder.copy_prefixes(copies)

    def _recompute(self, rows: list[int]) -> None:
        self.decoder.prefill([self.rows.prefix(row) for row in rows], self._slot_S[rows].tolist())

    def _remove(self, row: int) -> None:
        last, slot = self.rows.count - 1, self._slot_S[row]
        self._tenure_S[slot] += 1
        self._slot_S[row], self._slot_S[last] = self._slot_S[last], slot
        self._row_S[self._slot_S[row]], self._row_S[slot] = row, last
        self.rows.remove(row)
        self._truncation = None

    # Steps

    def _decode(self) -> list[tuple[Ticket, GenerationResult]]:
        before, self._launched = self._launched, self._launch()
        return [] if before is None else self._read(before)

    def _launch(self) -> _Launch | None:
        """Enqueue a token for every row that has one to come after the step in flight."""
        rows, count = self.rows, self.rows.count
        length_B = rows.feed_2S[1, :count] + 1
        if self._launched is not None:
            flown, tenures_B = self._launched.flight.slots_B, self._launched.tenures_B
            length_B[self._row_S[flown[self._tenure_S[flown] == tenures_B]]] += 1
        going_B = np.flatnonzero(length_B < rows.end_S[:count])
        if not going_B.size:
            return None
        slots_B = self._slot_S[going_B]
        truncation = self._plan_truncation(going_B)
        flight = self.decoder.launch(slots_B, truncation)
        return _Launch(flight, self._tenure_S[slots_B], truncated=truncation is not None)

    def _plan_truncation(self, going_B: NDArray[np.int64]) -> SamplingPlan | None:
        wanted = self.rows.sampling(going_B)
        if not wanted.truncated_B.any():
            return None
        if self._truncation is None or not np.array_equal(self._truncation[0], going_B):
            self._truncation = going_B, plan_sampling(wanted, self.runner.device)
        plan = self._truncation[1]
        return None if plan.truncated_R is None else plan

    def _read(self, launched: _Launch) -> list[tuple[Ticket, GenerationResult]]:
        tokens_B, logprobs_B = launched.flight.wait()
        slots_B = launched.flight.slots_B
        mine_B = self._tenure_S[slots_B] == launched.tenures_B
        if not np.isfinite(logprobs_B[mine_B]).all():
            raise EngineError(f"the model produced non-finite logits with weight version {self.version}")
        self.counters.tokens += int(mine_B.sum())
        self.counters.decode_steps += 1
        ended = []
        rows_B = self._row_S[slots_B[mine_B]]
        for row in self.rows.append(tokens_B[mine_B], logprobs_B[mine_B], rows_B, _kept_of(launched, mine_B)).tolist():
            ended.append((self.rows.tickets[row], self.rows.result(row)))
            self._remove(row)
        return ended


def _kept_of(launched: _Launch, mine_B: NDArray[np.bool_]) -> KeptIds:
    """What the tokens of the rows that are still there were drawn from, by their places among those rows."""
    if not launched.truncated:
        return {}
    place_B = np.cumsum(mine_B) - 1
    return {int(place_B[row]): ids for row, ids in launched.flight.kept().items() if mine_B[row]}


def _seed64(seed: int) -> int:
    """Any integer as 64 bits, read as a signed number."""
    folded = (seed % 2**128 ^ (seed % 2**128 >> 64) * 0x9E3779B97F4A7C15) % 2**64
    return folded - 2**64 if folded >= 2**63 else folded

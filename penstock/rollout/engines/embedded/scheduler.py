"""Which request has which slot, and the decode step over the active ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.errors import EngineError
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.engines.embedded.active_requests import ActiveRequests
from penstock.rollout.engines.embedded.prefills import PrefillCache, Prefix
from penstock.rollout.engines.embedded.requests import Ticket
from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.rollout.engines.embedded.sampling import SamplingPlan, plan_sampling, sample

PREFILL_ENTRIES = 8
"""Prefixes that are cached for later requests."""
_SLOTS_PER_ADMISSION = 16
"""A new prompt is prefilled when one in this many slots is free ..."""
_MAX_HELD = 8
"""... or after this many steps."""


@dataclass
class Counters:
    """Totals since the engine started."""

    tokens: int = 0
    decode_steps: int = 0
    prefills: int = 0
    """Prefixes that went through the model, without recomputation after a weight update."""
    prefill_tokens: int = 0
    shared_prefills: int = 0
    """Requests that took their prefix from another one's prefill."""
    recomputed: int = 0
    """Running requests whose keys and values were recomputed under new weights."""
    busy_seconds: float = 0.0
    slot_seconds: float = 0.0


class Scheduler:
    """Continuous batching: a request joins when a slot is free and leaves when it ends. Runs in the engine's thread.

    Invariants: a ticket is in `waiting`, in `rows`, or gone; row r's keys and values are in cache row r; prefills in
    the cache were made under `version`.

    Worked example, 2 slots and the requests a1, a2, a3 of one group:

        step 1    a1 and a2 are admitted on one prefill, a3 waits; a token each
        step 2    a1 draws its stop token and is settled; a2's row moves to row 0
        step 3    a3 joins in row 1, on the same prefill; a token each for a2 and a3
    """

    def __init__(self, runner: ModelRunner, version: int) -> None:
        self.runner = runner
        self.version = version
        self.waiting: deque[Ticket] = deque()
        self.rows = ActiveRequests(runner.slots, runner.max_model_len)
        self.prefills = PrefillCache(PREFILL_ENTRIES)
        self.counters = Counters()
        self._plan: SamplingPlan | None = None
        self._held = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.rows.count or self.waiting)

    def step(self) -> list[tuple[Ticket, GenerationResult]]:
        """Admit requests that fit, then generate one token for every active row; returns the responses that ended."""
        start = time.perf_counter()
        self._admit()
        active = self.rows.count
        ended = self._decode()
        elapsed = time.perf_counter() - start
        self.counters.busy_seconds += elapsed
        self.counters.slot_seconds += elapsed * active / self.runner.slots
        return ended

    def drain(self) -> list[tuple[Ticket, GenerationResult]]:
        """Finish what is under way on the device, so that a job sees a token boundary; returns what ended."""
        return []

    def drop(self, gone: Set[Ticket]) -> None:
        """Remove requests, waiting or running, without settling them; only after `drain`."""
        self.waiting = deque(ticket for ticket in self.waiting if ticket not in gone)
        for row in reversed(range(self.rows.count)):
            if self.rows.tickets[row] in gone:
                self._remove(row)

    def give_back(self) -> list[tuple[Ticket, GenerationResult]]:
        """Remove all requests, waiting or running, with what they have so far; only after `drain`."""
        given = [(ticket, self.rows.result(row, ended=False)) for row, ticket in enumerate(self.rows.tickets)]
        given += [(ticket, ticket.unbegun()) for ticket in self.waiting]
        self.drop({ticket for ticket, _ in given})
        return given

    def weights_changed(self, version: int, recompute: bool) -> None:
        """Continue under new weights; with `recompute`, the running requests' keys and values are computed again.

        Only after `drain`.
        """
        self.version = version
        self.prefills.clear()
        for row, ticket in enumerate(self.rows.tickets):
            ticket.version_marks.append((self.rows.generated(row), version))
        if recompute and self.rows.count:
            fed = [row for row in range(self.rows.count) if self.rows.feed_2S[1, row] > 0]
            self._recompute(fed)
            self.counters.recomputed += len(fed)

    def release_weights(self) -> None:
        """Let go of the weights, which are about to be freed."""
        self.runner.release_weights()

    def attach_weights(self) -> None:
        """Take hold of the weights again, now in new memory."""
        self.runner.attach_weights()

    def free(self) -> None:
        """Give the memory for keys and values back."""
        self.runner.cache.free()
        self.prefills.clear()

    def let_go(self) -> None:
        """Give all memory back, the model's too; nothing is generated any more."""
        self.free()
        self.release_weights()
        self.runner.let_go()

    def restore(self) -> None:
        """Take the memory again."""
        self.runner.cache.allocate()

    def _recompute(self, rows: list[int]) -> None:
        for row, kv_ZKTD in zip(rows, self.runner.prefill([self.rows.prefix(row) for row in rows]), strict=True):
            self.runner.cache.write_prefix(row, 1, kv_ZKTD)

    def _admit(self) -> None:
        free = self.runner.slots - self.rows.count
        if not free or not self.waiting or self._better_later(free):
            return
        by_prefix: dict[Prefix, list[Ticket]] = {}
        for _ in range(min(free, len(self.waiting))):
            ticket = self.waiting.popleft()
            by_prefix.setdefault(ticket.prefix_ids, []).append(ticket)
        self._seat(by_prefix)
        self.counters.shared_prefills += sum(len(tickets) - 1 for tickets in by_prefix.values())
        self._plan = None

    def _better_later(self, free: int) -> bool:
        """Whether to leave a few slots empty for a few steps, because one prefill for several prompts costs little more
        than one for a single prompt."""
        enough = min(len(self.waiting), self.runner.slots // _SLOTS_PER_ADMISSION)
        if free >= enough or self._held == _MAX_HELD or self.waiting[0].prefix_ids in self.prefills:
            self._held = 0
            return False
        self._held += 1
        return True

    def _seat(self, by_prefix: dict[Prefix, list[Ticket]]) -> None:
        """Give each request a row, with the keys and values of its prefix."""
        for prefix, kv_ZKTD in self._prefixes(list(by_prefix)).items():
            tickets = by_prefix[prefix]
            if kv_ZKTD is not None:
                self.runner.cache.write_prefix(self.rows.count, len(tickets), kv_ZKTD)
            for ticket in tickets:
                ticket.version_marks.append((ticket.earlier, self.version))
                self.rows.add(ticket)

    def _prefixes(self, wanted: list[Prefix]) -> dict[Prefix, Tensor | None]:
        """Keys and values of each prefix, from the cache or the model; None for the empty prefix."""
        found: dict[Prefix, Tensor | None] = {prefix: self.prefills.get(prefix) for prefix in wanted}
        missing = [prefix for prefix, kv_ZKTD in found.items() if kv_ZKTD is None and prefix]
        self.counters.shared_prefills += sum(kv_ZKTD is not None for kv_ZKTD in found.values())
        if missing:
            for prefix, kv_ZKTD in zip(missing, self.runner.prefill(missing), strict=True):
                found[prefix] = kv_ZKTD
                self.prefills.put(prefix, kv_ZKTD)
            self.counters.prefills += len(missing)
            self.counters.prefill_tokens += sum(map(len, missing))
        return found

    def _decode(self) -> list[tuple[Ticket, GenerationResult]]:
        rows, runner = self.rows, self.runner
        batch = runner.slots if runner.fixed_rows else rows.count
        if self._plan is None:
            self._plan = plan_sampling(rows.sampling(slice(0, batch)), runner.device)
        feed_2B = torch.from_numpy(rows.feed_2S[:, :batch]).to(runner.device)
        uniforms_B = torch.from_numpy(rows.uniforms(batch)).to(runner.device)
        logits_BV = runner.decode(feed_2B[0], feed_2B[1], runner.width(rows.longest))
        tokens_B, probs_B, kept = sample(logits_BV, uniforms_B, self._plan)
        tokens_B, probs_B = tokens_B[: rows.count], probs_B[: rows.count]
        if not (probs_B > 0.0).all():
            raise EngineError(f"the model produced non-finite logits with weight version {self.version}")
        self.counters.tokens += rows.count
        self.counters.decode_steps += 1
        ended: list[tuple[Ticket, GenerationResult]] = []
        for row in rows.append(tokens_B, np.log(probs_B), kept=kept).tolist():
            ended.append((rows.tickets[row], rows.result(row)))
            self._remove(row)
        return ended

    def _remove(self, row: int) -> None:
        last = self.rows.count - 1
        if row != last:
            self.runner.cache.move(row, last, int(self.rows.feed_2S[1, last]))
        self.rows.remove(row)
        self._plan = None

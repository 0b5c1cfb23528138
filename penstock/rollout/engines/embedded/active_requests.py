"""The state of each running request, one numpy column per fact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.engines.embedded.requests import Ticket
from penstock.rollout.engines.embedded.sampling import KeptIds, SamplingColumns

_UNIFORMS = 64
"""Random numbers drawn ahead per request."""
_NUMBERS_PER_COUNT = 4
"""Philox makes this many numbers of each value of its counter."""
_NOTHING_KEPT: KeptIds = {}


class ActiveRequests:
    """The active requests, in rows `0..count-1`.

    A row's tokens are the prompt and what was generated; the last one is *pending*: drawn (or given), but not yet fed
    to the model. `feed_2S` holds the pending tokens and their positions, which is what a decode step is fed with.

    Invariants: rows are contiguous; `feed_2S[0, r] == tokens_SC[r, feed_2S[1, r]]` for active rows and 0 for the
    others; a row's length is its pending position + 1 and stays below `end_S`.

    Worked example: a prompt [5, 6, 7] with max_new_tokens 2. `add` makes the row with 7 pending at position 2 and the
    end at length 5. `append` of a first token 9: 9 pending at position 3. `append` of a second: length 5, so it names
    the row as done, and `result` gives the two tokens.
    """

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.count = 0
        self.tickets: list[Ticket] = []
        self.feed_2S = np.zeros((2, slots), dtype=np.int64)
        self.tokens_SC = np.zeros((slots, max_model_len), dtype=np.int64)
        self.logprobs_SC = np.zeros((slots, max_model_len), dtype=np.float32)
        self.prompt_length_S = np.zeros(slots, dtype=np.int64)
        self.end_S = np.zeros(slots, dtype=np.int64)
        self.temperature_S = np.ones(slots, dtype=np.float32)
        self.top_k_S = np.zeros(slots, dtype=np.int64)
        self.top_p_S = np.ones(slots, dtype=np.float32)
        self.min_p_S = np.zeros(slots, dtype=np.float32)
        self.stops_SX = np.full((slots, 0), -1, dtype=np.int64)
        self._uniforms_SU = np.zeros((slots, _UNIFORMS))
        self._next_uniform_S = np.zeros(slots, dtype=np.int64)
        self._generators: list[np.random.Generator | None] = []
        self._kept: list[list[NDArray[np.int32]]] = []
        """Of the rows that are drawn from truncated distributions: what each token was drawn from."""
        self._row_S = np.arange(slots)
        self._watched = 0
        """Rows with stop strings."""

    @property
    def longest(self) -> int:
        """Tokens in the longest active row."""
        return int(self.feed_2S[1, : self.count].max()) + 1

    def add(self, ticket: Ticket) -> None:
        """Give the request the row `count`."""
        row, request, sampling = self.count, ticket.request, ticket.request.sampling
        prompt, given = len(request.prompt_ids), len(ticket.given_ids)
        self.tokens_SC[row, :given] = ticket.given_ids
        if request.generated is not None:
            self.logprobs_SC[row, prompt:given] = request.generated.logprobs
        self.feed_2S[:, row] = ticket.given_ids[-1], given - 1
        self.prompt_length_S[row] = prompt
        self.end_S[row] = min(prompt + sampling.max_new_tokens, self.tokens_SC.shape[1])
        self.temperature_S[row] = sampling.temperature
        self.top_k_S[row], self.top_p_S[row], self.min_p_S[row] = sampling.top_k, sampling.top_p, sampling.min_p
        self._set_stops(row, sampling.stop_token_ids)
        self._watched += ticket.begin_watch()
        self._generators.append(None)
        self._kept.append([] if request.generated is None else list(request.generated.kept_ids))
        self._next_uniform_S[row] = _UNIFORMS
        self.tickets.append(ticket)
        self.count += 1
        self._skip_uniforms(row, given - prompt)

    def _set_stops(self, row: int, stop_ids: frozenset[int]) -> None:
        missing = len(stop_ids) - self.stops_SX.shape[1]
        if missing > 0:
            self.stops_SX = np.pad(self.stops_SX, ((0, 0), (0, missing)), constant_values=-1)
        self.stops_SX[row] = -1
        self.stops_SX[row, : len(stop_ids)] = sorted(stop_ids)

    def uniforms(self, rows: int) -> NDArray[np.float64]:
        """The next random number of each active row; 0 for the inactive ones up to `rows`."""
        uniforms_B = np.zeros(rows)
        index_B = self._next_uniform_S[: self.count]
        for row in np.flatnonzero(index_B == _UNIFORMS).tolist():
            self._uniforms_SU[row] = self._generator(row).random(_UNIFORMS)
            index_B[row] = 0
        uniforms_B[: self.count] = self._uniforms_SU[self._row_S[: self.count], index_B]
        index_B += 1
        return uniforms_B

    def _skip_uniforms(self, row: int, count: int) -> None:
        """Go on after the numbers that a response's first tokens were drawn with: one each."""
        if count:
            whole, self._next_uniform_S[row] = divmod(count, _UNIFORMS)
            bits = self._generator(row).bit_generator
            assert isinstance(bits, np.random.Philox)
            bits.advance(whole * _UNIFORMS // _NUMBERS_PER_COUNT)
            self._uniforms_SU[row] = self._generator(row).random(_UNIFORMS)

    def _generator(self, row: int) -> np.random.Generator:
        """Counter-based and keyed by the request's seed alone: nothing that shares the batch can shift its numbers."""
        generator = self._generators[row]
        if generator is None:
            key = self.tickets[row].request.seed % 2**128
            generator = self._generators[row] = np.random.Generator(np.random.Philox(key=key))
        return generator

    def append(
        self,
        tokens_B: NDArray[np.int64],
        logprobs_B: NDArray[np.floating],
        rows_B: NDArray[np.integer] | None = None,
        kept: KeptIds = _NOTHING_KEPT,
    ) -> NDArray[np.integer]:
        """Add one token to every active row, or to those given; returns the rows that ended, the last one first.

        `kept` says what the tokens of truncated distributions were drawn from, by their places in `tokens_B`.
        """
        place = slice(0, self.count) if rows_B is None else rows_B  # a slice reads and writes without a copy
        rows_B = self._row_S[: self.count] if rows_B is None else rows_B
        position_B = self.feed_2S[1, place] + 1
        self.feed_2S[0, place], self.feed_2S[1, place] = tokens_B, position_B
        self.tokens_SC[rows_B, position_B] = tokens_B
        self.logprobs_SC[rows_B, position_B] = logprobs_B
        for place_of, ids in kept.items():
            if place_of < len(rows_B):
                self._kept[rows_B[place_of]].append(ids)
        ended_B = position_B + 1 >= self.end_S[place]
        if self.stops_SX.shape[1]:
            ended_B |= (tokens_B[:, None] == self.stops_SX[place]).any(axis=1)
        if self._watched:
            drawn = zip(rows_B.tolist(), tokens_B.tolist(), strict=True)
            ended_B |= np.array([self.tickets[row].completes_stop(token) for row, token in drawn], dtype=bool)
        return np.sort(rows_B[ended_B])[::-1]

    def sampling(self, rows: slice | NDArray[np.integer]) -> SamplingColumns:
        """How these rows want their tokens drawn."""
        return SamplingColumns(self.temperature_S[rows], self.top_k_S[rows], self.top_p_S[rows], self.min_p_S[rows])

    def generated(self, row: int) -> int:
        """How many tokens the row's response has."""
        return int(self.feed_2S[1, row] + 1 - self.prompt_length_S[row])

    def prefix(self, row: int) -> tuple[int, ...]:
        """The row's tokens that have been fed to the model: all but the pending one."""
        return tuple(self.tokens_SC[row, : self.feed_2S[1, row]].tolist())

    def result(self, row: int, *, ended: bool = True) -> GenerationResult:
        """The response of a row that ended, or what it has so far."""
        response = slice(self.prompt_length_S[row], self.feed_2S[1, row] + 1)
        at_stop_token = bool((self.feed_2S[0, row] == self.stops_SX[row]).any())
        return self.tickets[row].result(
            self.tokens_SC[row, response].tolist(),
            self.logprobs_SC[row, response].tolist(),
            at_stop_token,
            tuple(self._kept[row]),
            ended=ended,
        )

    def remove(self, row: int) -> None:
        """Free the row; the last active row moves into it."""
        last = self.count - 1
        self._watched -= self.tickets[row].watch is not None
        if row != last:
            length = self.feed_2S[1, last] + 1
            self.tokens_SC[row, :length] = self.tokens_SC[last, :length]
            self.logprobs_SC[row, :length] = self.logprobs_SC[last, :length]
            self.feed_2S[:, row] = self.feed_2S[:, last]
            for column in self._columns():
                column[row] = column[last]
            self.tickets[row], self._generators[row] = self.tickets[last], self._generators[last]
            self._kept[row] = self._kept[last]
        self._kept.pop()
        self.tickets.pop()
        self._generators.pop()
        self.feed_2S[:, last] = 0
        self.temperature_S[last] = 1.0
        self.top_k_S[last], self.top_p_S[last], self.min_p_S[last] = 0, 1.0, 0.0
        self.count = last

    def _columns(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self.prompt_length_S,
            self.end_S,
            self.temperature_S,
            self.top_k_S,
            self.top_p_S,
            self.min_p_S,
            self.stops_SX,
            self._uniforms_SU,
            self._next_uniform_S,
        )

"""Keys and values behind the Hugging Face `Cache` interface.

Axes: Z a layer's keys or values (`2 * layer`, `2 * layer + 1`), Y layer, S slot, B active slot, K key-value head, C
position in the slot's context, D head dimension, P prompt, T position in a prefix, L key-value head of a row (of
all slots, or of a step's rows), J any position of a layer (of all slots and heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from penstock.errors import SetupError
from penstock.rollout.engines.embedded.attention import per_head


@dataclass(frozen=True)
class KVShape:
    """What one position of one slot takes."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_prefix(cls, prefix_ZKTD: Tensor) -> KVShape:
        """The shape that a model's own keys and values have."""
        sides, heads, _, head_dim = prefix_ZKTD.shape
        return cls(sides // 2, heads, head_dim, prefix_ZKTD.dtype, prefix_ZKTD.device)


class SlotCache(Cache):  # type: ignore[misc]
    """A fixed block of memory per slot; a decode step writes one position per active row and reads a view.

    Invariants: rows `0..n-1` are the active ones; everything is finite (masked positions are multiplied by zero, which
    does not hide a NaN), so memory starts as zeros; `update` is only called between `begin_step` and the next one.

    With `keys_by_depth` the numbers of one depth lie side by side in the keys, position after position, and not those
    of one position: a query's scores are then sums of rows, which on a CPU, with heads of 32 numbers, takes about half
    the time. `kv_ZSKCD` is for callers that need the other layout.

    Worked example, 4 slots of 128 positions:

        write_prefix(0, 3, prefix)      rows 0, 1, 2 hold the same 10 positions: three samples of one group
        begin_step(0, 32, positions)    the step writes position 10 of rows 0..2 and attends to K[:3, :, :32]
        move(0, 2, 11)                  the request of row 0 ended; row 2 takes its place, rows 0..1 are active
    """

    def __init__(self, shape: KVShape, slots: int, max_model_len: int, *, keys_by_depth: bool = False) -> None:
        super().__init__(layers=[])
        self.shape, self._slots, self._context = shape, slots, max_model_len
        self._keys_by_depth = keys_by_depth
        self._kv_ZSKCD = torch.empty(0)
        self.allocate()

    def allocate(self) -> None:
        """Take the memory."""
        shape = self.shape
        try:
            self._keys_YSKCD, self._values_YSKCD = self._new_memory()
        except RuntimeError as error:
            positions = 2 * shape.layers * self._slots * shape.heads * self._context
            gib = positions * shape.head_dim * shape.dtype.itemsize / 2**30
            raise SetupError(
                f"rollout.engine: max_num_seqs = {self._slots} slots of max_model_len = {self._context} tokens need "
                f"{gib:,.1f} GiB for keys and values, which could not be allocated; lower one of them"
            ) from error
        self._heads_of_all = [per_head(*sides) for sides in zip(self._keys_YSKCD, self._values_YSKCD, strict=True)]
        self._flat_values_JD = [value_SKCD.view(-1, shape.head_dim) for value_SKCD in self._values_YSKCD]
        self._set_window(0, 0, 0)

    def _new_memory(self) -> tuple[Tensor, Tensor]:
        """Keys and values, `[Y, S, K, C, D]` each."""
        shape = self.shape

        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(sizes, dtype=shape.dtype, device=shape.device)

        if not self._keys_by_depth:
            self._kv_ZSKCD = zeros(2 * shape.layers, self._slots, shape.heads, self._context, shape.head_dim)
            return self._kv_ZSKCD[0::2], self._kv_ZSKCD[1::2]
        keys_YSKDC = zeros(shape.layers, self._slots, shape.heads, shape.head_dim, self._context)
        values_YSKCD = zeros(shape.layers, self._slots, shape.heads, self._context, shape.head_dim)
        return keys_YSKDC.transpose(-1, -2), values_YSKCD

    @property
    def kv_ZSKCD(self) -> Tensor:
        """All of the memory; empty while it is freed."""
        assert not self._keys_by_depth, "keys and values lie apart"
        return self._kv_ZSKCD

    def free(self) -> None:
        """Give the memory back; `allocate` before the next use."""
        self._kv_ZSKCD = self._keys_YSKCD = self._values_YSKCD = torch.empty(0)
        self._heads_of_all, self._flat_values_JD = [], []
        self._set_window(0, 0, 0)

    def begin_step(self, first: int, width: int, positions_B: Tensor) -> None:
        """The next forward writes `positions_B` of the rows from `first` on, and attends to `width` positions."""
        rows = positions_B.shape[0]
        if self._window != (first, rows, width):
            self._set_window(first, rows, width)
        self._position_L = positions_B.unsqueeze(-1).expand(-1, self.shape.heads).reshape(-1)
        self._place_L = torch.add(self._position_L, self._head_L, alpha=self._context)

    def _set_window(self, first: int, rows: int, width: int) -> None:
        """Make the views of a step; the next steps mostly have the same."""
        self._window = (first, rows, width)
        heads = slice(first * self.shape.heads, (first + rows) * self.shape.heads)
        self._head_L = torch.arange(heads.start, heads.stop, device=self.shape.device)
        self._heads = [
            (key_LDC[heads, :, :width], value_LCD[heads, :width]) for key_LDC, value_LCD in self._heads_of_all
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention layers with `[B, K, 1, D]`."""
        depth = self.shape.head_dim
        self.heads_after(layer_idx, key_states.reshape(-1, depth), value_states.reshape(-1, depth))
        first, rows, width = self._window
        window = (layer_idx, slice(first, first + rows), slice(None), slice(width))
        return self._keys_YSKCD[window], self._values_YSKCD[window]

    def heads_after(self, layer: int, key_LD: Tensor, value_LD: Tensor) -> tuple[Tensor, Tensor]:
        """Write one position of every L. Gives the layer's keys `[L, D, C]` and values `[L, C, D]` (see `per_head`)."""
        all_key_LDC, _ = self._heads_of_all[layer]
        all_key_LDC[self._head_L, :, self._position_L] = key_LD
        self._flat_values_JD[layer].index_copy_(0, self._place_L, value_LD)
        return self._heads[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions differ by row and are given explicitly, so this is only asked for by models that log it."""
        return self._window[2]

    def write_prefix(self, start: int, count: int, prefix_ZKTD: Tensor) -> None:
        """Copy one prefix into `count` rows."""
        length = prefix_ZKTD.shape[2]
        rows = (slice(None), slice(start, start + count), slice(None), slice(length))
        self._keys_YSKCD[rows] = prefix_ZKTD[0::2].unsqueeze(1)
        self._values_YSKCD[rows] = prefix_ZKTD[1::2].unsqueeze(1)

    def read_prefix(self, row: int, length: int) -> Tensor:
        """The first positions of a row, as a copy."""
        sides_YKTD = (self._keys_YSKCD[:, row, :, :length], self._values_YSKCD[:, row, :, :length])
        return torch.stack(sides_YKTD, dim=1).flatten(0, 1)

    def move(self, target: int, source: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for side_YSKCD in (self._keys_YSKCD, self._values_YSKCD):
            side_YSKCD[:, target, :, :length] = side_YSKCD[:, source, :, :length]


class PrefixCapture(Cache):  # type: ignore[misc]
    """Keeps the keys and values of one forward over whole prefixes."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.sides_PKTD: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention layers with `[P, K, T, D]`."""
        self.sides_PKTD[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing comes before a prefix."""
        return 0

    def prefixes_ZKTD(self, lengths: list[int]) -> list[Tensor]:
        """Each prompt's keys and values without the padding, as a copy."""
        sides_PKTD = [side for layer in range(len(self.sides_PKTD)) for side in self.sides_PKTD[layer]]
        return [torch.stack([side[p, :, :length] for side in sides_PKTD]) for p, length in enumerate(lengths)]

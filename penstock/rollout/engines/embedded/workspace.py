"""Memory that a lean decode step writes on its way, and the views of it that the layers use.

Rows come and go between steps, layers within one. What depends on the number of rows alone is made once for all layers
and until that number changes: cutting a tensor into views costs a small model as much as computing on them.

Axes: B row, H hidden, N query head, K key-value head, R query heads and then key heads, D head dimension, E half of it,
G query head of one key-value head, L key-value head of a row, J the columns of a merged matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """What the attention layers of a model have in common."""

    query: int
    key_value: int
    depth: int


class Workspace:
    """For steps of `rows` rows. Every layer overwrites what the previous one left; nothing outlives a step.

    A layer's path through it: `inner_BH` holds the normalised input, `qkv_BJ` its projections, of which `query_BND`,
    `key_BKD` and `query_key_BRD` are parts. `rotate` turns them by `angles_B2D` into `turned_LGD`, the queries as
    attention takes them, and `stored_key_LD` and `stored_value_LD`, the keys and values as the cache does. `inner_BH`
    then holds the input of the MLP, and `gates` its projections.
    """

    def __init__(self, rows: int, hidden_size: int, heads: Heads, device: torch.device) -> None:
        query, key_value, depth = heads.query, heads.key_value, heads.depth
        self.rows, self._device = rows, device
        self.inner_BH = self._empty(hidden_size)
        qkv_BRD = self._empty(query + 2 * key_value, depth)
        self.qkv_BJ = qkv_BRD.view(rows, -1)
        self.query_BND, self.key_BKD, self._value_BKD = torch.split(qkv_BRD, [query, key_value, key_value], 1)
        self.query_key_BRD = qkv_BRD[:, : query + key_value]
        self._halves_BRE = self.query_key_BRD.chunk(2, dim=-1)
        swapped_BRD = self._empty(query + key_value, depth)
        self._swapped_halves_BRE = swapped_BRD.chunk(2, dim=-1)
        self._swapped_query_BND, self._swapped_key_BKD = torch.split(swapped_BRD, [query, key_value], 1)
        self._turned_query_BND = self._empty(query, depth)
        self.turned_LGD = self._turned_query_BND.view(rows * key_value, -1, depth)
        self._stored_key_BKD, self._stored_value_BKD = self._empty(key_value, depth), self._empty(key_value, depth)
        self.stored_key_LD, self.stored_value_LD = (
            self._stored_key_BKD.flatten(0, 1),
            self._stored_value_BKD.flatten(0, 1),
        )
        self.angles_B2D = self._empty(2, depth)
        self._cos_B1D, sin_B1D = self.angles_B2D.chunk(2, dim=1)
        self._sin_halves_B1E = sin_B1D.chunk(2, dim=-1)
        self._gates: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def rotate(self) -> None:
        """Rotate queries and keys, and put everything where attention and cache want it.

        A half is turned into the other one; the minus sign of the first is in the table of angles.
        """
        (first_BRE, second_BRE), (first_sin_B1E, second_sin_B1E) = self._halves_BRE, self._sin_halves_B1E
        torch.mul(second_BRE, first_sin_B1E, out=self._swapped_halves_BRE[0])
        torch.mul(first_BRE, second_sin_B1E, out=self._swapped_halves_BRE[1])
        torch.addcmul(self._swapped_query_BND, self.query_BND, self._cos_B1D, out=self._turned_query_BND)
        torch.addcmul(self._swapped_key_BKD, self.key_BKD, self._cos_B1D, out=self._stored_key_BKD)
        self._stored_value_BKD.copy_(self._value_BKD)

    def gates(self, inner: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate and up side by side `[B, 2 * inner]`, and each of the two."""
        if inner not in self._gates:
            both_BJ = self._empty(2 * inner)
            gate_BI, up_BI = both_BJ.chunk(2, dim=-1)
            self._gates[inner] = (both_BJ, gate_BI, up_BI)
        return self._gates[inner]

    def _empty(self, *sizes: int) -> Tensor:
        return torch.empty((self.rows, *sizes), dtype=torch.float32, device=self._device)

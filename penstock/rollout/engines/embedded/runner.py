"""Calling the model: prefills over whole prefixes, decode steps over the active slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.errors import SetupError
from penstock.rollout.engines.embedded import attention
from penstock.rollout.engines.embedded.fused import fuse
from penstock.rollout.engines.embedded.prefills import Prefix, length_chunks
from penstock.rollout.engines.embedded.slot_cache import KVShape, PrefixCapture, SlotCache
from penstock.rollout.engines.embedded.supported import check_config
from penstock.weights.hf import CausalLM

_WIDTH_STEP = 16
"""Decode attention covers the longest active row, rounded up to this many positions."""
_SMALL_STEP = 500_000_000
"""Floating-point operations of a decode step below which the engine keeps to one CPU thread."""


class ModelRunner:
    """The model as two calls on its slot cache: `prefill` and `decode`.

    In deterministic mode every decode step has the same shapes (all slots, the whole context) and every prefix is
    prefilled alone, so a row's numbers cannot depend on what else is running. Whether they depend on the row's place in
    the batch is up to the kernels: that is tested once at the start, and if they do, rows are decoded one by one.
    """

    def __init__(
        self, model: Any, *, slots: int, max_model_len: int, deterministic: bool, use_fused: bool = True
    ) -> None:
        check_config(model.config, max_model_len)
        self.lm = CausalLM(model)
        self.slots, self.max_model_len, self.deterministic = slots, max_model_len, deterministic
        self.device: torch.device = self.lm.head_weight_VH.device
        self.vocabulary: int = self.lm.head_weight_VH.shape[0]
        probe_ids_1T = torch.arange(min(3, max_model_len), device=self.device).unsqueeze(0) % self.vocabulary
        expected_H = self.lm.hidden_BTH(probe_ids_1T, use_cache=False)[0, -1]
        attention.install(model)
        if deterministic and hasattr(model.config, "_experts_implementation"):
            # The one whose result for a token does not depend on which other tokens chose the same expert.
            model.set_experts_implementation("batched_mm")
        self._fused = fuse(self.lm.body, max_model_len) if use_fused else None
        self._use_fused = use_fused
        self._column_C = torch.arange(max_model_len, device=self.device)
        prefix_ZKTD = self._probe_prefix(probe_ids_1T)
        # Kernels, the engine's own (which come without the lean step) and torch's, want a position's numbers together.
        by_depth = use_fused and attention.is_plain_products(prefix_ZKTD)
        self.cache = SlotCache(KVShape.of_prefix(prefix_ZKTD), slots, max_model_len, keys_by_depth=by_depth)
        self._zero = torch.zeros((), dtype=prefix_ZKTD.dtype, device=self.device)
        self._minus_inf = torch.full_like(self._zero, -torch.inf)
        self._one_by_one = False
        self._check_decoding(probe_ids_1T[0], prefix_ZKTD, expected_H)
        self._one_by_one = deterministic and not self._rows_are_alike(prefix_ZKTD)

    @property
    def fixed_rows(self) -> bool:
        """Whether every decode step must be given all slots, active or not."""
        return self.deterministic and not self._one_by_one

    def release_weights(self) -> None:
        """Let go of the weights, which are about to be freed."""
        self._fused = None

    def attach_weights(self) -> None:
        """Take hold of the weights again, now in new memory."""
        self._fused = fuse(self.lm.body, self.max_model_len) if self._use_fused else None

    def let_go(self) -> None:
        """Let go of the model for good, so that its memory is free although somebody may still look at the engine."""
        self.release_weights()
        del self.lm

    def allow_fused(self) -> None:
        """Use the lean decode step after all, if the model fits it."""
        self._use_fused = True
        self.attach_weights()

    # Prefill

    def prefill(self, prefixes: list[Prefix]) -> list[Tensor]:
        """Keys and values (`[Z, K, T, D]`) of each prefix; a prefix has at least one token."""
        lengths = [len(prefix) for prefix in prefixes]
        chunks = [[p] for p in range(len(prefixes))] if self.deterministic else length_chunks(lengths)
        results: dict[int, Tensor] = {}
        for chunk in chunks:
            results.update(zip(chunk, self._prefill_padded([prefixes[p] for p in chunk]), strict=True))
        return [results[p] for p in range(len(prefixes))]

    def _prefill_padded(self, prefixes: list[Prefix]) -> list[Tensor]:
        """One forward, padded on the right: under causal attention no token sees the padding behind it."""
        lengths = [len(prefix) for prefix in prefixes]
        longest = max(lengths)
        ids_PT = torch.tensor([prefix + (0,) * (longest - len(prefix)) for prefix in prefixes], device=self.device)
        position_ids_PT = self._column_C[:longest].expand(len(prefixes), longest)
        capture = PrefixCapture()
        self.lm.hidden_BTH(ids_PT, position_ids=position_ids_PT, past_key_values=capture, use_cache=True)
        return capture.prefixes_ZKTD(lengths)

    # Decode

    def width(self, longest: int) -> int:
        """Positions that a decode step attends to when the longest active row holds `longest` tokens."""
        if self.deterministic:
            return self.max_model_len
        return min(-(-longest // _WIDTH_STEP) * _WIDTH_STEP, self.max_model_len)

    def decode(self, tokens_B: Tensor, positions_B: Tensor, width: int) -> Tensor:
        """Feed one token per row (rows `0..B-1`) at its position; returns the logits of the next token in float32."""
        if not self._one_by_one:
            return self._head(self._decode_hidden(0, tokens_B, positions_B, width))
        logits_1V = [
            self._head(self._decode_hidden(row, tokens_B[row : row + 1], positions_B[row : row + 1], width))
            for row in range(tokens_B.shape[0])
        ]
        return torch.cat(logits_1V)

    def _decode_hidden(self, first: int, tokens_B: Tensor, positions_B: Tensor, width: int) -> Tensor:
        rows = tokens_B.shape[0]
        visible_B11C = self._column_C[:width] <= positions_B.view(rows, 1, 1, 1)
        visible_BK1C = visible_B11C.expand(-1, self.cache.shape.heads, -1, -1)
        mask_BK1C = torch.where(visible_BK1C, self._zero, self._minus_inf).contiguous()
        self.cache.begin_step(first, width, positions_B)
        if self._fused is not None:
            return self._fused(tokens_B, positions_B, mask_BK1C, self.cache)
        hidden_B1H = self.lm.hidden_BTH(
            tokens_B.unsqueeze(1),
            attention_mask=mask_BK1C,
            position_ids=positions_B.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
        )
        return hidden_B1H[:, 0]

    def _head(self, hidden_BH: Tensor) -> Tensor:
        return self.lm.logits(hidden_BH)

    # Trying the model out, once

    def _probe_prefix(self, ids_1T: Tensor) -> Tensor:
        """A prefix through the cache; a model that does not hand its keys and values to the cache shows here."""
        name = type(self.lm.model).__name__
        try:
            (prefix_ZKTD,) = self._prefill_padded([tuple(ids_1T[0, :-1].tolist())])
        except (RuntimeError, TypeError, AttributeError, KeyError, ValueError) as error:
            raise SetupError(f"{name} does not work with the embedded engine's key-value cache: {error}") from error
        return prefix_ZKTD

    def _check_decoding(self, ids_T: Tensor, prefix_ZKTD: Tensor, expected_H: Tensor) -> None:
        """A cached decode step must give what the model's own forward over the whole sequence gives."""
        rows, last = min(2, self.slots), ids_T.shape[0] - 1
        self.cache.write_prefix(0, rows, prefix_ZKTD)
        positions_B = torch.full((rows,), last, device=self.device)
        got_BH = self._decode_hidden(0, ids_T[last:].repeat(rows), positions_B, self.width(last + 1))
        error = float((got_BH - expected_H).float().norm(dim=-1).max() / expected_H.float().norm())
        if not error <= (1e-3 if expected_H.dtype in (torch.float32, torch.float64) else 0.1):
            raise SetupError(
                f"{type(self.lm.model).__name__} decodes differently with the embedded engine's key-value cache than "
                f"in a whole forward (relative error {error:.2g}); use another engine"
            )

    def _rows_are_alike(self, prefix_ZKTD: Tensor) -> bool:
        """Whether a row's result, to the bit, depends neither on its place in the batch nor on the other rows."""
        self.cache.write_prefix(0, self.slots, prefix_ZKTD)
        tokens_S = torch.zeros(self.slots, dtype=torch.long, device=self.device)
        positions_S = torch.full_like(tokens_S, prefix_ZKTD.shape[2])
        same_SV = self.decode(tokens_S, positions_S, self.max_model_len)
        tokens_S[1:] += torch.arange(1, self.slots, device=self.device) % self.vocabulary
        mixed_SV = self.decode(tokens_S, positions_S, self.max_model_len)
        return bool((same_SV == same_SV[0]).all()) and bool((mixed_SV[0] == same_SV[0]).all())


def threads_for_step(model: Any, slots: int, *, deterministic: bool = False) -> int:
    """One thread if a decode step on the CPU is small, or results may not depend on the number; 0 for torch's count.

    More threads then gain little when alone on the machine, and lose much when they share it with a trainer: each of
    the step's many small operations waits for any thread that is not currently running.
    """
    operations = 2 * slots * sum(parameter.numel() for parameter in model.parameters())
    on_cpu = model.get_output_embeddings().weight.device.type == "cpu"
    return 1 if on_cpu and (deterministic or operations < _SMALL_STEP) else 0

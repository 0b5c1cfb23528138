"""Memory estimate: what a run will hold at its peak, from settings and shapes alone, before a weight is loaded.

Weights, gradients, optimizer state and keys and values are exact. Activations and logits are estimates of the largest
microbatch that the settings allow; docs/verify.md has the formulas.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from penstock.config.models import RunConfig
from penstock.run.verify.adapters import adapter_sizes, itemsize, model_settings
from penstock.run.verify.findings import Check, Finding, Status
from penstock.runtime.cpu import lanes_for_rest, threads_for_half
from penstock.runtime.free_memory import free_bytes
from penstock.training.targets import uses_reference
from penstock.weights.facts import ModelFacts, read_facts
from penstock.weights.hf import pick_device

_FLOAT32 = 4

MEMORY = Check(
    "memory",
    "memory (estimate)",
    (
        "total_bytes",
        "free_bytes",
        "trainer_weights_bytes",
        "engine_weights_bytes",
        "reference_weights_bytes",
        "gradients_bytes",
        "optimizer_bytes",
        "kv_cache_bytes",
        "activations_bytes",
        "logits_bytes",
        "checkpoint_copy_bytes",
        "loaded_bytes",
        "largest_microbatch_tokens",
    ),
    "The run is likely to run out of memory. To use less: activations with training.max_tokens_per_microbatch or "
    "training.gradient_checkpointing; keys and values by rollout.engine.max_num_seqs and max_model_len; logits by "
    "training.logprob_chunk_tokens; gradients and optimizer by model.lora; weights by model.dtype.",
)


@dataclass(frozen=True)
class Weights:
    """Bytes that follow from the parameters alone."""

    trainer: int
    engine: int
    gradients: int
    """In the dtype they accumulate in: float32 or float64."""
    optimizer: int
    """AdamW's two moments, and float32 master copies of parameters with fewer bits."""
    transient_gradients: int
    """A second set in the parameters' own dtype."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The parts of the peak, in bytes."""

    trainer_weights: int
    engine_weights: int
    reference_weights: int
    gradients: int
    optimizer: int
    kv_cache: int
    activations: int
    logits: int
    checkpoint_copy: int
    """On the CPU: what a checkpoint is written from while training continues."""
    largest_microbatch_tokens: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: value for name, value in asdict(self).items() if name != "largest_microbatch_tokens"}

    @property
    def total(self) -> int:
        """All of it at the same time."""
        return sum(self.parts.values())

    @property
    def loaded(self) -> int:
        """What is allocated as soon as engine and trainer are built."""
        return self.trainer_weights + self.engine_weights + self.reference_weights + self.kv_cache


async def check_memory(config: RunConfig) -> Finding:
    """The estimate against what is free now."""
    estimate = await asyncio.to_thread(estimate_memory, config)
    free = free_bytes(pick_device(config.runtime.device))
    figures = {f"{name}_bytes": value for name, value in estimate.parts.items()}
    figures |= {
        "total_bytes": estimate.total,
        "free_bytes": free,
        "loaded_bytes": estimate.loaded,
        "largest_microbatch_tokens": estimate.largest_microbatch_tokens,
    }
    largest = sorted(estimate.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name.replace('_', ' ')} {in_words(value)}" for name, value in largest if value)
    status = Status.PASS if estimate.total <= free else Status.FAIL
    return Finding(
        status,
        f"{in_words(estimate.total)} at the peak",
        figures,
        {"total_bytes": free},
        f"{in_words(free)} free",
        problem=f"{in_words(estimate.total - free)} more than is free." if status is Status.FAIL else "",
        notes=(f"an estimate: {parts}",),
    )


def estimate_memory(config: RunConfig) -> MemoryEstimate:
    """Nothing is loaded: shapes are in the headers of the model's files."""
    facts = read_facts(config.model)
    weights = _weights(config, facts)
    shape = model_settings(config.model).get_text_config()
    size = itemsize(config.model)
    lanes, ranks = _lanes(config), config.rollout.engine.ranks
    tokens, together = microbatch_tokens(config, lanes)
    return MemoryEstimate(
        trainer_weights=weights.trainer,
        engine_weights=weights.engine * ranks * (2 if _is_shared(config) else 1),
        reference_weights=weights.engine if uses_reference(config.algorithm) and config.model.lora is None else 0,
        gradients=weights.gradients + (lanes * weights.transient_gradients if lanes > 1 else 0),
        optimizer=weights.optimizer,
        kv_cache=ranks
        * kv_cache_bytes(shape, config.rollout.engine.max_num_seqs, config.rollout.engine.max_model_len, size),
        activations=activation_bytes(
            shape,
            together,
            size,
            row=min(tokens, config.rollout.engine.max_model_len),
            scores=_keeps_scores(config),
            checkpointing=config.training.gradient_checkpointing,
        ),
        logits=_logits_bytes(config, shape.vocab_size, tokens, size, lanes),
        checkpoint_copy=weights.trainer + weights.optimizer if _copies_for_checkpoints(config) else 0,
        largest_microbatch_tokens=tokens,
    )


def kv_cache_bytes(shape: Any, slots: int, max_model_len: int, size: int) -> int:
    """Keys and values of every layer, slot, position and key-value head."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    return 2 * int(shape.num_hidden_layers) * slots * max_model_len * int(heads) * head_dimension(shape) * size


def activation_bytes(shape: Any, tokens: int, size: int, *, row: int, scores: bool, checkpointing: bool) -> int:
    """What a forward pass over `tokens` tokens, in rows of up to `row`, keeps for its backward pass.

    Per token and layer: about 6 times the hidden size (norms, residuals, inputs of projections), 5 times the queries',
    4 times the keys', 4 times the MLP's width; twice the hidden size for each expert of a token; with attention that
    keeps `scores` those of a row, for each head.
    """
    hidden, depth = int(shape.hidden_size), head_dimension(shape)
    queries = int(shape.num_attention_heads) * depth
    keys = int(getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads) * depth
    experts = int(getattr(shape, "num_experts_per_tok", None) or 0)
    width = experts * int(getattr(shape, "moe_intermediate_size", None) or shape.intermediate_size)
    numbers = 6 * hidden + 5 * queries + 4 * keys + 4 * (width or int(shape.intermediate_size)) + 2 * experts * hidden
    if scores:
        numbers += int(shape.num_attention_heads) * row
    layer = numbers * size + (4 * hidden * _FLOAT32 if size < _FLOAT32 else 0)  # norms compute in float32
    layers = int(shape.num_hidden_layers)
    kept = layers * hidden * size + layer if checkpointing else layers * layer
    return tokens * (kept + 2 * hidden * size)


def head_dimension(shape: Any) -> int:
    """Numbers of one attention head."""
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


def microbatch_tokens(config: RunConfig, lanes: int) -> tuple[int, int]:
    """Tokens of the largest microbatch, and of all that are computed at the same time; never more than a step has."""
    context = config.rollout.engine.max_model_len
    step = config.training.prompt_groups_per_step * config.rollout.group_size * context
    largest = min(max(config.training.max_tokens_per_microbatch, context), step)
    return largest, min(lanes * largest, step)


def in_words(count: int) -> str:
    """A number of bytes in readable form."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _is_shared(config: RunConfig) -> bool:
    """Whether the weights that the engine loads exist a second time in CPU memory, on their way to it."""
    apart = config.runtime.engine_process or config.runtime.trainer_process
    return apart and pick_device(config.runtime.device).type == "cpu"


def _keeps_scores(config: RunConfig) -> bool:
    from penstock.training.backends.local.memory import keeps_attention_scores

    longest, device = config.rollout.engine.max_model_len, pick_device(config.runtime.device).type
    return keeps_attention_scores(config.model, config.training, longest, device)


def _logits_bytes(config: RunConfig, vocabulary: int, tokens: int, size: int, lanes: int) -> int:
    """The trainer's chunks of logits (plus a float32 copy below 32 bits), and a decode step's, used twice."""
    exact = max(size, _FLOAT32)
    chunk = min(config.training.logprob_chunk_tokens, tokens) * vocabulary
    trainer = lanes * chunk * (exact if size == exact else size + exact)
    return trainer + 2 * config.rollout.engine.ranks * config.rollout.engine.max_num_seqs * vocabulary * _FLOAT32


def _copies_for_checkpoints(config: RunConfig) -> bool:
    """A GPU's copy is in CPU memory, and does not count against the device's free memory."""
    every = (config.checkpoint.every_steps, config.checkpoint.every_minutes)
    saves = config.checkpoint.at_end or any(found is not None for found in every)
    return saves and pick_device(config.runtime.device).type == "cpu"


def _lanes(config: RunConfig) -> int:
    """As the trainer will have them; a GPU computes one microbatch at a time."""
    if pick_device(config.runtime.device).type != "cpu":
        return 1
    return lanes_for_rest(config.runtime.trainer_lanes, threads_for_half(config.runtime.trainer_threads))


def _weights(config: RunConfig, facts: ModelFacts) -> Weights:
    plain = facts.bytes
    trained = [(parameter.count, itemsize(config.model)) for parameter in facts.parameters]
    adapters = 0
    if config.model.lora is not None:
        trained = adapter_sizes(config)
        adapters = sum(count * size for count, size in trained)
    gradients = sum(count * max(size, _FLOAT32) for count, size in trained)
    masters = sum(count * _FLOAT32 for count, size in trained if size < _FLOAT32)
    transient = sum(count * size for count, size in trained)
    return Weights(plain + adapters, plain, gradients, 2 * gradients + masters, transient)

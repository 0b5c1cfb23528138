"""How much of the `shm` data plane the rows of a step take, before there are any: each a `key: reason` line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.config.models import RunConfig
from penstock.data_plane import fields
from penstock.data_plane.adapters.shm.space import aligned
from penstock.data_plane.field_spec import FLOATING, FieldKind
from penstock.rollout.environments.extra_columns import ExtraColumn

_WIDTHS = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
    **dict.fromkeys(("int32", "float32", FLOATING), 4),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes of a value; those of floating-point columns at least."""
_OFFSET = 8
_SHORTEST = 2
"""Tokens of the shortest row: one of the prompt, one generated."""


def group_bytes(rows: int, tokens: int, kept: int = 0, extra: Sequence[ExtraColumn] = ()) -> int:
    """What a group takes at least, as one put, with `tokens` and `kept` token ids of truncated sampling in each row.

    `extra` are the environment's own columns. Texts and other objects count as one byte each.
    """
    size = 0
    for name in fields.ROLLOUT_FIELDS:
        spec = fields.SPECS[name]
        values = 1
        if spec.kind is FieldKind.PER_TOKEN:
            values = kept if name == fields.KEPT_IDS else tokens
        size += aligned(rows * values * (1 if spec.dtype is None else _WIDTHS[spec.dtype]))
    # Where rows begin: in the tokens' columns, in the kept ids, in the texts.
    size += 3 * aligned((rows + 1) * _OFFSET)
    return size + sum(_extra_bytes(column, rows, tokens) for column in extra)


def _extra_bytes(column: ExtraColumn, rows: int, tokens: int) -> int:
    """Per-token columns begin where the tokens' columns do."""
    if column.dtype is None:
        return aligned(rows) + aligned((rows + 1) * _OFFSET)
    values = math.prod(column.shape) * (tokens if column.kind == "per_token" else 1)
    return aligned(rows * values * _WIDTHS[column.dtype])


def steps_that_never_fit(config: RunConfig, extra: Sequence[ExtraColumn] = ()) -> Iterator[str]:
    """The shortest rows that there can be, with the environment's own columns, are too many for the capacity."""
    if config.data_plane.adapter != "shm":
        return
    least = config.training.prompt_groups_per_step * group_bytes(config.rollout.group_size, _SHORTEST, 0, extra)
    if least > _capacity(config):
        yield (
            f"data_plane.capacity_gb: {config.data_plane.capacity_gb:g} is too small for a step, whose rows stay until "
            f"it ends: {_shape(config)} take at least {least / 1e9:.3g} GB, even with rows of {_SHORTEST} tokens; "
            "raise it"
        )


def steps_that_may_not_fit(config: RunConfig, extra: Sequence[ExtraColumn] = ()) -> Iterator[str]:
    """The capacity is enough only as long as rows are shorter than they may be."""
    if config.data_plane.adapter != "shm" or any(steps_that_never_fit(config, extra)):
        return
    groups, longest = config.training.prompt_groups_per_step, config.rollout.engine.max_model_len
    kept = longest if config.rollout.sampling.is_truncated else 0
    each = group_bytes(config.rollout.group_size, longest, kept, extra) + _added_bytes(config, longest)
    ahead = config.buffer.max_buffered_groups
    if groups * each > _capacity(config):
        yield (
            f"data_plane.capacity_gb: {config.data_plane.capacity_gb:g} may be too small for a step, whose rows stay "
            f"until it ends: {_shape(config)} take up to {groups * each / 1e9:.3g} GB with rows of {longest} tokens "
            "(rollout.engine.max_model_len). A run that gets there ends, with a last checkpoint; raise it to be safe"
        )
    elif _waits_for_later_groups(config) and (groups + ahead) * each > _capacity(config):
        yield (
            f"data_plane.capacity_gb: {config.data_plane.capacity_gb:g} may be too small for a step and the groups of "
            f"later ones that are ready before it ends: with buffer.max_buffered_groups = {ahead} they take up to "
            f"{(groups + ahead) * each / 1e9:.3g} GB with rows of {longest} tokens (rollout.engine.max_model_len). A "
            "run that gets there ends, with a last checkpoint; raise it to be safe"
        )


def _waits_for_later_groups(config: RunConfig) -> bool:
    """Whether groups that no step may train yet can be in the way of those that are waited for."""
    bound_to_steps = config.staleness.policy == "in_order" and config.staleness.lookahead > 0
    return config.weight_sync.mode == "drain" or bound_to_steps


def _added_bytes(config: RunConfig, tokens: int) -> int:
    """Log-probs that the trainer adds to a group, per token: of the reference policy, and of the old policy."""
    columns = (config.algorithm.kl.coefficient > 0) + (config.training.minibatches_per_step > 1)
    return columns * aligned(config.rollout.group_size * tokens * _WIDTHS[FLOATING])


def _capacity(config: RunConfig) -> int:
    return aligned(int(config.data_plane.capacity_gb * 1e9))


def _shape(config: RunConfig) -> str:
    groups, size = config.training.prompt_groups_per_step, config.rollout.group_size
    return f"{groups} {'group' if groups == 1 else 'groups'} (training.prompt_groups_per_step) of {size}"

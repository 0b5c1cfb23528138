"""A step of several updates: its groups in equal shares, and the results of the updates as those of one step."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.algorithms.reduction import Normaliser, StepMetric, merge_metrics
from penstock.data_plane.fields import group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.interface import StepResult

_DRIFT = ("approx_kl", "clip_fraction", "ratio_max")
"""Shown for the last update as well: by then the policy has moved furthest from the one that the step began with."""


def split_groups(metas: Sequence[KVBatchMeta], parts: int) -> list[KVBatchMeta]:
    """The groups of all chunks in at most `parts` shares, whose sizes differ by one group at most."""
    joined = KVBatchMeta.concat(metas)
    groups = joined.group_ids
    parts = min(parts, len(groups))
    bounds = [round(place * len(groups) / parts) for place in range(parts + 1)]
    share_of = {group: place for place in range(parts) for group in groups[bounds[place] : bounds[place + 1]]}
    rows: list[list[int]] = [[] for _ in range(parts)]
    for row, sample in enumerate(joined.sample_ids):
        rows[share_of[group_of(sample)]].append(row)
    return [joined.subset(chosen) for chosen in rows]


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """The updates of a batch as one step; how a metric is merged is what it says itself."""
    last = results[-1]
    measured = merge_metrics(result.measured for result in results)
    measured |= {
        f"{name}_last": result.measured[name] for result in results for name in _DRIFT if name in result.measured
    }
    measured["minibatches"] = StepMetric(float(len(results)), Normaliser.NONE)
    return StepResult(
        last.step_id,
        updated=any(result.updated for result in results),
        version=last.version,
        nonfinite_groups=tuple(group for result in results for group in result.nonfinite_groups),
        measured=measured,
        data_plane=last.data_plane,
    )

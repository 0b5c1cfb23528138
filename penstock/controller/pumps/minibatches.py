"""A step of several updates: its groups in equal shares, and the results of the updates as those of one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.data_plane.fields import group_of
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.interface import StepResult

_SUMS = ("tokens", "sequences", "microbatches", "train_seconds", "total_flops", "nonfinite_steps")
_LAST = ("lr", "ranks", "theoretical_tflops")
_DRIFT = ("approx_kl", "clip_fraction", "ratio_max")
"""Shown for the last update as well: by then the policy has moved furthest from the one that the step began with."""


@dataclass(frozen=True)
class Minibatches:
    """How many updates a step makes, and which metrics of theirs are means over sequences rather than tokens."""

    count: int = 1
    by_sequences: frozenset[str] = frozenset()


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


def merge_results(results: Sequence[StepResult], by_sequences: Collection[str] = ()) -> StepResult:
    """Sums are added, extremes kept, means weighted by the updates' trained tokens, or sequences for `by_sequences`.

    The step is an empty one only if all of its updates are.
    """
    last = results[-1]
    parts = [result.metrics for result in results]
    names = dict.fromkeys(name for part in parts for name in part)
    metrics = {name: _merged(name, parts, "sequences" if name in by_sequences else "tokens") for name in names}
    metrics |= {f"{name}_last": part[name] for part in parts for name in _DRIFT if name in part}
    if metrics.get("train_seconds"):
        metrics["achieved_tflops"] = metrics.get("total_flops", 0.0) / metrics["train_seconds"] / 1e12
        if "theoretical_tflops" in metrics:
            metrics["mfu"] = metrics["achieved_tflops"] / metrics["theoretical_tflops"]
    return StepResult(
        last.step_id,
        updated=any(result.updated for result in results),
        version=last.version,
        nonfinite_groups=tuple(group for result in results for group in result.nonfinite_groups),
        metrics={**metrics, "minibatches": float(len(results))},
    )


def _merged(name: str, parts: Sequence[Mapping[str, float]], weight: str) -> float:
    having = [part for part in parts if name in part]
    values = [part[name] for part in having]
    if name in _SUMS:
        return sum(values)
    if name in _LAST:
        return values[-1]
    if name.endswith("_max") or name.endswith("_max_abs"):
        return max(values)
    if name.endswith("_min") or name == "empty_steps":
        return min(values)
    weights = [part.get(weight, 0.0) for part in having]
    if not sum(weights):
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

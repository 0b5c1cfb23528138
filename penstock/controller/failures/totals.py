"""How often each kind of failure happened since the start, from the counts of events, for the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping

_TOTALS: dict[str, tuple[str, ...]] = {
    "failures/retried_infra": ("rollout_retried/infra",),
    "failures/retried_data": ("rollout_retried/data",),
    "failures/dropped_infra": ("prompt_dropped/infra",),
    "failures/dropped_data": ("prompt_dropped/data",),
    "failures/generation_timeouts": ("rollout_retried/GenerationTimeout", "prompt_dropped/GenerationTimeout"),
    "failures/environment_timeouts": ("rollout_retried/EnvironmentTimeout", "prompt_dropped/EnvironmentTimeout"),
    "failures/microbatches": ("train_microbatch_failed",),
    "failures/steps_replayed": ("step_replayed",),
    "failures/nonfinite_steps_skipped": ("nonfinite_step_skipped",),
    "failures/engines_out_of_service": ("engine_out_of_service",),
    "failures/engines_lost": ("engine_lost",),
    "failures/stalls": ("stalled",),
}
"""Metric, and the counts that make it up."""


def failure_totals(counts: Mapping[str, int]) -> dict[str, float]:
    """All keys, including those of failures that never happened, so that charts have no gaps."""
    return {metric: float(sum(counts.get(name, 0) for name in names)) for metric, names in _TOTALS.items()}

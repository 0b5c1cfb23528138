"""Names that settings had before, and what they are called now."""

from __future__ import annotations

BEFORE: dict[str, str] = {
    "sampler": "staleness",
    "sampler.kind": "staleness.policy",
    "sampler.max_staleness": "staleness.max_staleness",
    "sampler.over_sampling": "staleness.over_sampling",
    "sampler.order": "staleness.order",
    "sampler.lookahead": "staleness.lookahead",
    "sampler.class_path": "staleness.import_path",
    "sampler.args": "staleness.args",
    "algorithm.loss.level": "algorithm.loss.aggregation",
    "algorithm.loss.clip_low": "algorithm.loss.clip_ratio_low",
    "algorithm.loss.clip_high": "algorithm.loss.clip_ratio_high",
    "training.early_stop.good_is": "training.early_stop.mode",
    "checkpoint.best_is": "checkpoint.best_mode",
    "rollout.engine.slots": "rollout.engine.max_num_seqs",
    "rollout.engine.max_context": "rollout.engine.max_model_len",
    "rollout.environment.function": "rollout.environment.import_path",
    "rollout.environment.path": "rollout.environment.import_path",
    "weights": "weight_sync",
    "weights.update": "weight_sync.mode",
    "weights.kv_cache": "weight_sync.kv_cache",
    "model.attention": "model.attn_implementation",
}
"""Settings and sections by their old names."""

RENAMED = BEFORE | {"staleness.kind": "staleness.policy", "staleness.class_path": "staleness.import_path"}
"""The same with old names in sections that have their new name already."""

_EXTREMES = {"highest": "max", "lowest": "min"}
RENAMED_VALUES: dict[str, dict[str, str]] = {
    "algorithm.loss.aggregation": {
        "token": "token_mean",
        "sequence": "sequence_mean",
        "constant": "token_sum_norm",
    },
    "training.early_stop.mode": _EXTREMES,
    "checkpoint.best_mode": _EXTREMES,
}
"""Old names of values, by the setting that takes them."""

"""Which settings may change between two processes of a run, and how two configurations differ, key by key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config.models import RunConfig
from penstock.config.reading.keys import join, tag_of
from penstock.config.sections.base import Section

FIXED: dict[str, str] = {
    "seed": "the order of the prompts and the seed of every response come from it",
    "deterministic": "it decides whether ready groups are part of a checkpoint",
    "model.path": "tokenizer, reference policy and, with LoRA, the frozen weights come from it",
    "model.dtype": "weights, master copies and moments are saved in it",
    "model.lora.rank": "it sets the shape of the trained adapters",
    "model.lora.alpha": "it scales the trained adapters",
    "model.lora.target_modules": "they decide which layers are trained",
    "model.lora.path": "the adapter that the run began with has its own rank, alpha and layers",
    "data.train_split": "it chooses the prompts",
    "data.subset": "it chooses the prompts",
    "data.prompt_key": "it chooses the prompts",
    "data.train_size": "it chooses the prompts",
    "data.shuffle": "it is the order of the prompts",
    "data.chat_template_kwargs": "prompts are rendered with it, also those of ready groups",
    "rollout.sampling.temperature": "the log-probs of ready groups were computed at it",
    "rollout.environment.kind": "prompts, and the rewards of ready groups, come from it",
    "rollout.group_size": "ready groups have as many responses",
    "rollout.replay_from": "it is where groups come from",
    "staleness.policy": "dispatched groups were counted and stamped by it",
    "staleness.max_staleness": "dispatched groups were counted by it",
    "staleness.over_sampling": "dispatched groups were counted by it",
    "staleness.order": "it says which ready groups are trained first",
    "staleness.lookahead": "dispatched groups were stamped by it",
    "staleness.import_path": "dispatched groups were counted and stamped by it",
    "staleness.args": "dispatched groups were counted and stamped by it",
    "algorithm.advantage.import_path": "it is the code that the run's advantages came from",
    "algorithm.loss.import_path": "it is the code that the weights were trained with",
    "training.backend": "it is what was saved",
    "training.prompt_groups_per_step": "dispatched groups were counted by it, step by step",
}
"""Settings that a checkpoint's content depends on, and how."""

_FREE = {
    "": "run_dir",
    "model": "attn_implementation download trust_remote_code",
    "data": "train_path eval_path format eval_split download answer_key eval_size epochs chat_template overlong "
    "partial_step",
    "rollout": "max_inflight_groups generation_timeout_seconds record",
    "rollout.engine": "kind ranks max_num_seqs max_model_len",
    "rollout.sampling": "top_p top_k min_p max_new_tokens stop_token_ids stop",
    "rollout.environment": "args import_path rewards timeout_seconds workers in_process",
    "rollout.failure": "infra_attempts data_attempts backoff_seconds backoff_max_seconds max_dropped_prompts on_drop "
    "min_groups_per_step stall_seconds on_stall max_redispatches engine_replacements",
    "buffer": "max_buffered_groups",
    "algorithm": "entropy_coefficient old_policy",
    "algorithm.reward": "scale clip_low clip_high overlong overlong_limit overlong_buffer overlong_penalty",
    "algorithm.advantage": "kind normalize_std epsilon args whole_batch",
    "algorithm.loss": "kind aggregation constant_length clip_ratio_low clip_ratio_high dual_clip args columns",
    "algorithm.kl": "coefficient estimator place",
    "algorithm.correction": "kind cap low high mean",
    "algorithm.dynamic_sampling": "enabled max_filtered_per_step on_limit",
    "training": "min_groups_per_chunk minibatches_per_step batching max_tokens_per_microbatch logprob_chunk_tokens "
    "gradient_checkpointing max_steps max_minutes train_attempts nonfinite",
    "training.optimizer": "lr betas eps weight_decay warmup_steps schedule final_lr_ratio max_grad_norm",
    "training.early_stop": "metric mode reached patience min_change",
    "weight_sync": "mode kv_cache",
    "data_plane": "adapter capacity_gb when_full full_seconds observe on_event",
    "runtime": "kind device engine_process trainer_process engine_threads trainer_threads trainer_lanes restarts",
    "runtime.timeouts": "start_seconds silence_seconds weights_seconds trainer_seconds checkpoint_seconds stop_seconds",
    "checkpoint": "every_steps every_minutes at_end keep_latest keep_best best_metric best_mode",
    "eval": "at_start at_end every_steps greedy samples_per_prompt pass_at pass_reward max_new_tokens",
    "observe": "console trace samples_per_step",
    "observe.tensorboard": "folder",
    "observe.wandb": "project entity name mode",
    "observe.mlflow": "tracking_uri experiment name",
    "observe.prometheus": "port host",
}
FREE = frozenset(join(section, name) for section, names in _FREE.items() for name in names.split())
"""Settings that may change. Rows of ready groups have no advantages yet, so the algorithm may. The place that prompts
are read from may change if the prompts stay the same, which their digest in the checkpoint proves; `data.epochs` must
not fall below what was handed out, which the ledger knows."""

PLACES = ("model.path", "model.lora.path", "rollout.replay_from")
"""Fixed settings that may name a file or folder: the same path may be written in several ways."""

_SHOWN = 80


@dataclass(frozen=True)
class Change:
    """A setting that is not what it was in a checkpoint."""

    key: str
    before: object
    now: object

    @property
    def is_fixed(self) -> bool:
        """Whether the checkpoint depends on it; a section that was added or removed is as fixed as anything in it."""
        return any(key == self.key or key.startswith(f"{self.key}.") for key in FIXED)

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} -> {shown(self.now)}"


def changes(before: RunConfig, now: RunConfig) -> list[Change]:
    """The settings that differ, in the order of the models; except `run_dir`, as the folder may have been moved."""
    return [change for change in _changes(before, now, "") if change.key != "run_dir"]


def _changes(before: Section, now: Section, prefix: str) -> Iterator[Change]:
    for name in type(before).model_fields:
        key, was, found = join(prefix, name), getattr(before, name), getattr(now, name)
        if isinstance(was, Section) and isinstance(found, Section):
            if type(was) is type(found):
                yield from _changes(was, found, key)
            else:
                tag = tag_of(type(was))
                yield Change(join(key, tag), getattr(was, tag), getattr(found, tag))
        elif was != found and not (key in PLACES and _same_place(was, found)):
            yield Change(key, was, found)


def _same_place(one: object, other: object) -> bool:
    """Whether two strings lead to the same existing file or folder."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    try:
        return os.path.exists(one) and os.path.realpath(one) == os.path.realpath(other)
    except (OSError, ValueError):
        return False


def _is_section(value: object) -> bool:
    return isinstance(value, Section)


def shown(value: object) -> str:
    """A value for a person, as in YAML, on one line and not too long."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=lambda each: each.model_dump(mode="json") if _is_section(each) else str(each))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"

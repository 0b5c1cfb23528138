"""What one step was made of, as flat metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.buffer.slots import Slot
from penstock.controller.pumps.advantage import ScoredChunk
from penstock.rollout.environments.rewards.scores import Aggregation, combined_by_name


@dataclass
class StepTimes:
    """Seconds of one step, by what they went into."""

    exposed: float = 0.0
    """The train pump waited for rollouts."""
    train_busy: float = 0.0
    """The trainer computed."""
    logprobs: float = 0.0
    """Log-probs of the reference policy, if the algorithm needs them."""
    advantages: float = 0.0
    """Small columns read and advantages written."""
    finish: float = 0.0
    """`finish_train_step`, after the last chunk has trained."""
    sync_prepare: float = 0.0
    """Engines fetched new weights while they generated."""
    sync_pause: float = 0.0
    """Engines stood still for new weights."""
    sync: float = 0.0
    """The whole weight update, including draining in `drain` mode."""


@dataclass
class StepStats:
    """Collects what the controller learns about a step's samples; `metrics()` returns the flat keys of the spec."""

    times: StepTimes = field(default_factory=StepTimes)
    _chunks: list[ScoredChunk] = field(default_factory=list)
    _lags: list[int] = field(default_factory=list)
    _spans: list[int] = field(default_factory=list)
    _environments: list[str] = field(default_factory=list)
    _evicted_lengths: list[int] = field(default_factory=list)
    _sampled_rewards: list[Tensor] = field(default_factory=list)
    _filtered: int = 0
    _components: list[Mapping[str, float]] = field(default_factory=list)
    _measured: list[Mapping[str, float]] = field(default_factory=list)
    """What rewards are made of, and what environments measured, by name, of each sample."""
    _aggregations: dict[str, Aggregation] = field(default_factory=dict)
    """How numbers that environments measured become one, if that is not their mean."""

    def add_chunk(self, chunk: ScoredChunk, slots: Sequence[Slot], trainer_version: int) -> None:
        """A chunk was handed to the trainer."""
        self._chunks.append(chunk)
        self._lags += [trainer_version - slot.start_version for slot in slots]
        self._spans += [int(tags["last_version"]) - int(tags["first_version"]) for tags in chunk.meta.tags]
        self._environments += [str(tags["environment"]) for tags in chunk.meta.tags]
        self._components += [tags.get("components", {}) for tags in chunk.meta.tags]
        self._measured += [
            {f"{tags['environment']}/{name}": number for name, number in tags.get("metrics", {}).items()}
            for tags in chunk.meta.tags
        ]
        for tags in chunk.meta.tags:
            for name, how in tags.get("aggregations", {}).items():
                self._aggregations[f"{tags['environment']}/{name}"] = how

    def add_scored(self, chunk: ScoredChunk, filtered: int) -> None:
        """A chunk has advantages; `filtered` groups of it are replaced and not handed to the trainer."""
        self._sampled_rewards.append(chunk.rewards_S)
        self._filtered += filtered

    @property
    def chunks(self) -> Sequence[ScoredChunk]:
        """The chunks handed to the trainer, in order."""
        return self._chunks

    def add_evicted(self, slots: Iterable[Slot]) -> None:
        """Groups were evicted as stale."""
        for slot in slots:
            if slot.meta is not None:
                self._evicted_lengths += [int(tags["response_length"]) for tags in slot.meta.tags]

    def metrics(self) -> dict[str, float]:
        """Flat keys; only what there is data for."""
        found: dict[str, float] = {f"timing/{name}_s": value for name, value in vars(self.times).items()}
        if self._evicted_lengths:
            found["rollout/length_evicted_mean"] = sum(self._evicted_lengths) / len(self._evicted_lengths)
        if self._sampled_rewards:
            found["rollout/reward_mean"] = float(torch.cat(self._sampled_rewards).mean())
            found["train/groups_filtered"] = float(self._filtered)
        if not self._chunks:
            return found
        rewards_S = torch.cat([chunk.rewards_S for chunk in self._chunks])
        lengths_S = torch.cat([chunk.lengths_S for chunk in self._chunks]).float()
        advantages_S = torch.cat([chunk.advantages_S for chunk in self._chunks])
        truncated_S = torch.cat([chunk.truncated_S for chunk in self._chunks]).float()
        shaped_S = torch.cat([chunk.shaped_S for chunk in self._chunks])
        mask_S = torch.cat([chunk.mask_S for chunk in self._chunks])
        found |= {
            "train/reward_mean": float(rewards_S.mean()),
            "train/reward_std": float(rewards_S.std(correction=0)),
            "train/reward_max": float(rewards_S.max()),
            "train/shaped_reward_mean": float(shaped_S.mean()),
            "train/samples_masked": float((mask_S == 0).sum()),
            "train/advantage_mean": float(advantages_S.mean()),
            "train/advantage_std": float(advantages_S.std(correction=0)),
            "train/groups_without_spread": float(sum(len(chunk.flat_groups()) for chunk in self._chunks)),
            "rollout/response_length_mean": float(lengths_S.mean()),
            "rollout/response_length_max": float(lengths_S.max()),
            "rollout/truncation_rate": float(truncated_S.mean()),
            "staleness/lag_mean": sum(self._lags) / len(self._lags),
            "staleness/lag_max": float(max(self._lags)),
            "staleness/token_version_span_max": float(max(self._spans)),
        }
        found |= {f"staleness/lag_histogram/{lag}": float(n) for lag, n in sorted(Counter(self._lags).items())}
        found |= {f"reward/{name}": mean for name, mean in combined_by_name(self._components).items()}
        measured = combined_by_name(self._measured, self._aggregations)
        found |= {f"rollout/{name}": number for name, number in measured.items()}
        return found | self._per_environment(
            {
                "train/reward_mean": rewards_S,
                "rollout/response_length_mean": lengths_S,
                "rollout/truncation_rate": truncated_S,
            }
        )

    def _per_environment(self, columns: dict[str, Tensor]) -> dict[str, float]:
        return {
            f"{key}/{name}": float(values_S[[environment == name for environment in self._environments]].mean())
            for name in dict.fromkeys(self._environments)
            for key, values_S in columns.items()
        }

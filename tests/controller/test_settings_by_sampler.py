"""Every setting of the step's algorithm has its effect under every sampler; where it cannot, it is rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.rollout.engines.base import FinishReason, GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.rollout.prompts import Prompt
from tests.support.scripted_run import ScriptedRun, scripted_config

SAMPLERS: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "windowed": {"max_staleness": 1},
    "in_order": {"lookahead": 1},
    "weight_fifo": {"lookahead": 1, "max_staleness": 1},
    "ready_first": {"lookahead": 1},
}
PROMPTS, GROUPS = 24, 4
LONGEST = 8
"""What `ScriptedRun` lets a response have."""


def script(request: GenerationRequest) -> ScriptedResponse:
    """Responses of 3 tokens, and cut off at the longest for every third prompt; ready in another order."""
    number = request.prompt_ids[0]
    cut = number % 3 == 0
    tokens = tuple(range(3, 3 + (LONGEST if cut else 3)))
    return ScriptedResponse(0.001 * (7 * number % 5), tokens, FinishReason.LENGTH if cut else FinishReason.STOP)


class Rewards:
    """The two samples of a prompt get 1 and 3; those of every fourth prompt both 1."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def __call__(self, prompt: Prompt) -> float:
        self._calls[prompt.prompt_id] += 1
        flat = int(prompt.prompt_id) % 4 == 0
        return 1.0 if flat or self._calls[prompt.prompt_id] % 2 else 3.0


def shaped(run: ScriptedRun) -> list[float]:
    return [step["train/shaped_reward_mean"] - step["train/reward_mean"] for step in run.steps]


@dataclass(frozen=True)
class Setting:
    """Sections of a configuration, and what a run shows where they are honoured and does not show else."""

    shows: Callable[[ScriptedRun], bool]
    sections: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)


def refilled(run: ScriptedRun) -> bool:
    """Flat groups are gone, and steps are full all the same; the last two may be short, as the data ends in them."""
    sizes = list(Counter(chunk.step_id for chunk in run.trainer.trained for _ in chunk.group_ids).values())
    filtered = {event["prompt_id"] for event in run.names("group_filtered")}
    full = PROMPTS - PROMPTS // 4
    return len(filtered) == PROMPTS // 4 and sum(sizes) == full and sizes[:-2] == [GROUPS] * len(sizes[:-2])


def shaped_by_length(run: ScriptedRun) -> bool:
    """The whole penalty of 2 for responses of 8 tokens, which a third of the prompts has, and none for 3."""
    return sum(change * GROUPS for change in shaped(run)) == pytest.approx(-2.0 * PROMPTS / 3)


def masked(run: ScriptedRun) -> bool:
    return sum(step["train/samples_masked"] for step in run.steps) == 2 * PROMPTS / 3


def scaled(run: ScriptedRun) -> bool:
    return all(step["train/shaped_reward_mean"] == pytest.approx(0.5 * step["train/reward_mean"]) for step in run.steps)


def clipped(run: ScriptedRun) -> bool:
    return all(step["train/shaped_reward_mean"] == pytest.approx(2.0) for step in run.steps)


def several_updates(run: ScriptedRun) -> bool:
    """Two updates a step, but one version, and every group in one of them."""
    steps = PROMPTS // GROUPS
    return (len(run.trainer.finished), run.trainer.version, len(set(run.trained_groups))) == (2 * steps, steps, PROMPTS)


def second_epoch(run: ScriptedRun) -> bool:
    return len(set(run.trained_groups)) == 2 * PROMPTS and len(run.steps) == 2 * PROMPTS // GROUPS


SETTINGS = {
    "dynamic_sampling": Setting(refilled, algorithm={"dynamic_sampling": {"enabled": True}}),
    "overlong_soft": Setting(
        shaped_by_length,
        algorithm={
            "reward": {"overlong": "soft", "overlong_limit": LONGEST, "overlong_buffer": 2, "overlong_penalty": 2.0}
        },
    ),
    "overlong_mask": Setting(masked, algorithm={"reward": {"overlong": "mask"}}),
    "reward_scale": Setting(scaled, algorithm={"reward": {"scale": 0.5}}),
    "reward_clip": Setting(clipped, algorithm={"reward": {"clip_low": 2.0, "clip_high": 2.5, "scale": 0.5}}),
    "minibatches_per_step": Setting(
        several_updates, sections={"training": {"minibatches_per_step": 2, "min_groups_per_chunk": GROUPS}}
    ),
    "epochs": Setting(second_epoch, sections={"data": {"epochs": 2}}),
}


def run_of(sampler: str, setting: Setting | None = None) -> ScriptedRun:
    sections, algorithm = (setting.sections, setting.algorithm) if setting else ({}, {})
    config = scripted_config(
        staleness={"policy": sampler, **SAMPLERS[sampler]},
        algorithm={"correction": {"kind": "tis"}, **algorithm},
        **sections,
    )
    return ScriptedRun(config, prompts=PROMPTS, script=script, reward=Rewards())


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", SETTINGS)
async def test_a_setting_has_its_effect_under_the_sampler(name: str, sampler: str) -> None:
    run = run_of(sampler, SETTINGS[name])
    assert await run.run() == "data_exhausted"
    assert SETTINGS[name].shows(run)
    assert run.rows_left == 0


@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_without_the_settings_none_of_the_effects_is_there(sampler: str) -> None:
    run = run_of(sampler)
    assert await run.run() == "data_exhausted"
    assert [name for name, setting in SETTINGS.items() if setting.shows(run)] == []


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_several_updates_of_a_step_that_streams_are_rejected_with_the_reason(sampler: str) -> None:
    setting = Setting(several_updates, sections={"training": {"minibatches_per_step": 2, "min_groups_per_chunk": 1}})
    with pytest.raises(ValidationError, match=r"training\.minibatches_per_step: .*whole step first"):
        run_of(sampler, setting)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "algorithm",
    [{"advantage": {"kind": "reward"}}, {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}],
    ids=["reward", "kl"],
)
def test_dynamic_sampling_that_would_bias_a_step_is_rejected_with_the_reason(
    algorithm: dict[str, Any], sampler: str
) -> None:
    setting = Setting(refilled, algorithm={"dynamic_sampling": {"enabled": True}, **algorithm})
    with pytest.raises(ValidationError, match=r"algorithm\.dynamic_sampling\.enabled: .*would bias the step"):
        run_of(sampler, setting)

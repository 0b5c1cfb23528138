"""Groups without spread in their rewards are replaced, whatever the sampler, and every prompt has one end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.errors import TooManyFiltered
from penstock.rollout.prompts import Prompt
from tests.controller.test_policies import SAMPLERS, jitter
from tests.support.scripted_run import ScriptedRun, scripted_config


class Rewards:
    """Prompts in `flat` always get 1; the two samples of any other get 0 and 1."""

    def __init__(self, flat: set[int]) -> None:
        self._flat = flat
        self._calls: Counter[str] = Counter()

    def __call__(self, prompt: Prompt) -> float:
        self._calls[prompt.prompt_id] += 1
        return 1.0 if int(prompt.text) in self._flat else float(self._calls[prompt.prompt_id] % 2)


def dynamic(flat: set[int], *, prompts: int, sampler: dict[str, Any] | None = None, **settings: Any) -> ScriptedRun:
    algorithm = {"correction": {"kind": "tis"}, "dynamic_sampling": {"enabled": True, **settings}}
    config = scripted_config(staleness=sampler or {"policy": "on_policy"}, algorithm=algorithm)
    return ScriptedRun(config, prompts=prompts, reward=Rewards(flat), script=jitter)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
async def test_steps_stay_full_and_every_prompt_has_one_end(sampler: dict[str, Any]) -> None:
    flat = {0, 1, 2, 3, 4, 9, 17, 18, 19}
    run = dynamic(flat, prompts=41, sampler=sampler)
    assert await run.run() == "data_exhausted"
    filtered = {int(event["prompt_id"]) for event in run.names("group_filtered")}
    assert filtered == flat
    assert len(run.names("group_filtered")) == len(flat)
    assert len(set(run.trained_groups)) == len(run.trained_groups) == 41 - len(flat)
    assert len(run.steps) == (41 - len(flat)) // 4
    in_steps = sum(step["train/groups_filtered"] for step in run.steps)  # the last may be filtered after the last step
    assert len(flat) - 1 <= in_steps == run.steps[-1]["rollout/groups_filtered"]
    assert all(step["train/groups_without_spread"] == 0 for step in run.steps)
    assert run.rows_left == 0


async def test_the_reward_of_what_was_sampled_is_not_that_of_what_was_trained() -> None:
    run = dynamic({0, 1, 2, 3}, prompts=8)
    await run.run()
    (step,) = run.steps
    assert step["train/reward_mean"] == 0.5
    assert step["rollout/reward_mean"] == 0.75


async def test_over_the_bound_groups_are_trained_as_they_are() -> None:
    run = dynamic({0, 1, 2, 3, 4, 5}, prompts=12, max_filtered_per_step=3)
    await run.run()
    assert [step["train/groups_filtered"] for step in run.steps] == [3, 0, 0]
    assert len(run.trained_groups) == 9


async def test_over_the_bound_the_run_stops_if_asked_to() -> None:
    run = dynamic({0, 1, 2, 3, 4, 5}, prompts=12, max_filtered_per_step=3, on_limit="stop")
    with pytest.raises(TooManyFiltered, match="max_filtered_per_step = 3"):
        await run.run()


async def test_data_that_teaches_nothing_ends_the_run_without_a_step() -> None:
    run = dynamic(set(range(6)), prompts=6)
    assert await run.run() == "data_exhausted"
    assert run.steps == []
    assert len(run.names("group_filtered")) == 6


async def test_off_flat_groups_are_trained() -> None:
    run = ScriptedRun(scripted_config(), prompts=4)
    await run.run()
    assert run.steps[0]["train/groups_without_spread"] == 4
    assert run.steps[0]["train/groups_filtered"] == 0

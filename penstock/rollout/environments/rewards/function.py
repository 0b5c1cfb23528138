"""`function`: the user's reward functions over a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import WrongReward
from penstock.rollout.environments.base import GenerationHandle, Segment, Split, Trajectory
from penstock.rollout.environments.rewards.functions import RewardFunction, RewardSpec, load_functions
from penstock.rollout.environments.rewards.plain_data import as_numbers
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.rewards.scores import (
    Score,
    checked_score,
    failures_about,
    failures_of,
    weighted_score,
)
from penstock.rollout.prompts import Prompt
from penstock.runtime.together import together
from penstock.text import cut, safe


@dataclass(frozen=True)
class _Played:
    """One response to score."""

    segments: tuple[Segment, ...]
    text: str
    inputs: Mapping[str, Any]
    """What reward functions get about it, by the names in `reward_signature.GIVEN`."""

    def trajectory(self, score: Score) -> Trajectory:
        return Trajectory(self.segments, score.reward, self.text, components=score.components)


class FunctionEnvironment:
    """One response per prompt, scored by one function or by several with weights.

    Functions are called by keyword with what their signatures name (`reward_signature`). The user's modules are
    imported in reward processes, not here, unless a function has to stay in this one.

    Example: with functions `exact` (weight 1) and `short` (weight 0.1) that give 1.0 and 0.5, the reward is 1.05 and
    its components are `exact` 1.0 and `short` 0.5.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], pool: RewardPool, *, train: Sequence[Prompt], held_out: Sequence[Prompt]
    ) -> None:
        self._pool = pool
        self._functions = load_functions(specs, pool, (*train, *held_out))
        self._renders = any(function.asks_for("rendered_prompt") for function in self._functions)
        self._prompts = {Split.TRAIN: train, Split.EVAL: held_out}

    @property
    def name(self) -> str:
        return f"function:{'+'.join(each.spec.component or each.spec.path for each in self._functions)}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Generate once, and call every function; one that takes groups gets a group of one."""
        played = await self._play(prompt, handle)
        with failures_about(played.text):
            scores = await _each(self._scores(function, prompt, [played]) for function in self._functions)
        return played.trajectory(self._combined(prompt, [score for [score] in scores]))

    async def close(self) -> None:
        """End the reward pool."""
        await self._pool.close()

    async def _play(self, prompt: Prompt, handle: GenerationHandle) -> _Played:
        prompt_ids = handle.encode_prompt(prompt.content)
        generation = await handle.generate(prompt_ids)
        response = handle.decode(generation.token_ids)
        messages = [dict(message) for message in prompt.messages or ({"role": "user", "content": prompt.text},)]
        inputs = {
            "prompt": prompt.text,
            "messages": messages,
            "rendered_prompt": safe(handle.decode_raw(prompt_ids)) if self._renders else None,
            "response": response,
            "response_ids": list(generation.token_ids),
            "answer": prompt.answer,
        }
        return _Played((Segment(prompt_ids), Segment(generation.token_ids, generation)), response, inputs)

    async def _scores(self, function: RewardFunction, prompt: Prompt, played: Sequence[_Played]) -> list[Score]:
        """One function's score for each; a function that takes single responses is given one."""
        call = function.group_inputs if function.spec.batched else function.inputs
        with failures_of(function.spec.path):
            value = await self._pool.score(function.function, **call(prompt, [each.inputs for each in played]))
            if not function.spec.batched:
                _refuse_list(value, prompt)
                return [checked_score(value, prompt)]
            scores = []
            for number, each in enumerate(_listed(value, len(played), prompt)):
                with failures_about(played[number].text, number):
                    scores.append(checked_score(each, prompt))
            return scores

    def _combined(self, prompt: Prompt, scores: Sequence[Score]) -> Score:
        """`scores` has one for each function."""
        names = [function.spec.component for function in self._functions]
        if names == [None]:
            return scores[0]
        weights = [function.spec.weight for function in self._functions]
        return weighted_score(list(zip(map(str, names), weights, scores, strict=True)), prompt)


class GroupFunctionEnvironment(FunctionEnvironment):
    """Has functions that get a whole group at once; they are called when its last response has arrived."""

    async def run_group(self, prompt: Prompt, handles: Sequence[GenerationHandle]) -> list[Trajectory]:
        """Play all samples of a group; the other functions score each response as it comes."""
        single = [function for function in self._functions if not function.spec.batched]
        grouped = [function for function in self._functions if function.spec.batched]

        async def one(number: int, handle: GenerationHandle) -> tuple[_Played, list[list[Score]]]:
            played = await self._play(prompt, handle)
            with failures_about(played.text, number):
                return played, await _each(self._scores(function, prompt, [played]) for function in single)

        both = await together(*(one(number, handle) for number, handle in enumerate(handles)))
        group = [played for played, _ in both]
        # A failure of the whole call is not about a single response; a failure of a listed value knows which.
        of_groups = await _each(self._scores(function, prompt, group) for function in grouped)
        trajectories = []
        for number, (played, of_single) in enumerate(both):
            by_function = dict(zip(map(id, single), (score for [score] in of_single), strict=True))
            by_function |= {id(function): of_groups[place][number] for place, function in enumerate(grouped)}
            scores = [by_function[id(function)] for function in self._functions]
            with failures_about(played.text, number):
                trajectories.append(played.trajectory(self._combined(prompt, scores)))
        return trajectories


async def _each(work: Any) -> list[list[Score]]:
    """The results of several calls; a single one needs no extra task."""
    calls = list(work)
    return [await calls[0]] if len(calls) == 1 else await together(*calls)


def _refuse_list(value: object, prompt: Prompt) -> None:
    """A function that gets one response at a time returned a list."""
    found = as_numbers(value) if len(getattr(value, "shape", ())) else value
    if isinstance(found, list | tuple):
        raise WrongReward(
            f"the reward of prompt {prompt.prompt_id} is {cut(safe(repr(found)), 200)}, not a number; a function that "
            "takes a whole group and returns a list needs `batched: true` in rollout.environment.rewards",
            "returned a list, but is not `batched: true`",
        )


def _listed(value: object, count: int, prompt: Prompt) -> list[Any]:
    """What a function that gets groups returned: something for each response."""
    found = as_numbers(value)
    if count == 1 and not isinstance(found, list):  # an array of one is a number by now
        found = [found]
    if not isinstance(found, list) or len(found) != count:
        what = f"a list of {len(found)}" if isinstance(found, list) else f"{type(value).__name__}"
        raise WrongReward(
            f"the reward function returned {what} for {count} responses to prompt {prompt.prompt_id}; one with "
            f"`batched: true` returns a list with a number or a mapping for each",
            "returned a list of the wrong length" if isinstance(found, list) else f"returned {what}, not a list",
        )
    return found

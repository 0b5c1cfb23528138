"""`function`: a reward function of the user's over a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.imports import import_callable
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.plain_data import NotPlain, encode
from penstock.rollout.environments.reward_pool import FunctionName, RewardPool, is_importable
from penstock.rollout.environments.reward_worker import KEY, check_signature
from penstock.rollout.environments.single_turn import RewardCall, SingleTurnEnvironment
from penstock.rollout.prompts import Prompt


class FunctionEnvironment(SingleTurnEnvironment):
    """Calls `function(prompt=…, response=…, answer=…, **args)` for each response.

    The user's module is imported in a reward process, not here, unless the function has to stay in this one.
    """

    def __init__(
        self,
        path: str,
        args: Mapping[str, Any],
        pool: RewardPool,
        *,
        train: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ) -> None:
        super().__init__(pool)
        self._path = path
        self._args = dict(args)
        self._function = _in_a_process_or_here(path, self._args, pool, (*train, *held_out))
        self._prompts = {Split.TRAIN: train, Split.EVAL: held_out}

    @property
    def name(self) -> str:
        return f"function:{self._path}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    def call(self, prompt: Prompt, response: str) -> RewardCall:
        given = {"prompt": prompt.text, "response": response, "answer": prompt.answer, **self._args}
        return RewardCall(self._function, kwargs=given)

    def score(self, prompt: Prompt, response: str) -> object:
        """The reward, in this process."""
        call = self.call(prompt, response)
        function = import_callable(self._path, KEY, "function")
        return function(**call.kwargs)


def _in_a_process_or_here(
    path: str, args: Mapping[str, Any], pool: RewardPool, prompts: Iterable[Prompt]
) -> Callable[..., object] | FunctionName:
    """The function, checked: by its name where it can run in a process, else imported here, and the run says why."""
    if not pool.in_process:
        reason = _why_here(path, args, prompts)
        if reason is None:
            named = FunctionName(path)
            pool.check(named, KEY, list(args))
            return named
        pool.stay_in_process(path, reason)
    function = import_callable(path, KEY, "function")
    check_signature(path, function, list(args))
    return function


def _why_here(path: str, args: Mapping[str, Any], prompts: Iterable[Prompt]) -> str | None:
    if not is_importable(path.partition(":")[0]):
        return "its module cannot be imported by another process"
    try:
        encode(args)
    except NotPlain as error:
        return f"rollout.environment.args cannot cross to another process: {error}"
    for prompt in prompts:
        try:
            encode(prompt.answer)
        except NotPlain as error:
            return f"the answer of prompt {prompt.prompt_id} (data.answer_key) cannot cross to another process: {error}"
    return None

"""`reasoning_gym:<task>`: the procedural tasks and scorers of the reasoning-gym package."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.tasks.gym_scoring import score_entry
from penstock.rollout.environments.tasks.reasoning_gym_trial import try_out
from penstock.rollout.environments.turns.single_turn import RewardCall, SingleTurnEnvironment
from penstock.rollout.prompts import Prompt, derive_seed
from penstock.text import error_text, named_error

_DRAWS_PER_PROMPT = 20
"""How many entries are drawn, per training prompt asked for, to find ones that are not held out."""


class ReasoningGymEnvironment(SingleTurnEnvironment):
    """Training prompts never repeat a held-out question, however small the task's space is."""

    def __init__(
        self, task: str, args: Mapping[str, Any], pool: RewardPool, *, train_size: int, eval_size: int, seed: int
    ) -> None:
        super().__init__(pool)
        self._task = task
        self._args = dict(args)
        self._scorer = self._dataset(task, args, size=1, seed=0)
        try_out(task, args)
        held_out = self._dataset(task, args, size=eval_size, seed=derive_seed(seed, "eval") % 2**31)
        self._eval = [self._prompt(f"eval-{i}", _entry(held_out, i, task)) for i in range(eval_size)]
        self._train = self._draw_train(task, args, train_size, seed)

    @property
    def name(self) -> str:
        return f"reasoning_gym:{self._task}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._train if split is Split.TRAIN else self._eval

    def score(self, prompt: Prompt, response: str) -> object:
        return self._scorer.score_answer(answer=response.strip(), entry=prompt.facts["entry"])

    def call(self, prompt: Prompt, response: str) -> RewardCall:
        if type(self).score is not ReasoningGymEnvironment.score:  # a subclass has its own reward
            return super().call(prompt, response)
        return RewardCall(score_entry, (self._task, self._args, prompt.facts["entry"], response))

    def _draw_train(self, task: str, args: Mapping[str, Any], size: int, seed: int) -> list[Prompt]:
        held_out = {prompt.text for prompt in self._eval}
        draws = self._dataset(task, args, size=size * _DRAWS_PER_PROMPT, seed=derive_seed(seed, "train") % 2**31)
        train: list[Prompt] = []
        for index in range(size * _DRAWS_PER_PROMPT):
            if len(train) == size:
                break
            entry = _entry(draws, index, task)
            if entry["question"] not in held_out:
                train.append(self._prompt(f"train-{index}", entry))
        if len(train) < size:
            raise ConfigError(
                [
                    f"data.eval_size: {len(self._eval)} held-out prompts leave only {len(train)} of "
                    f"{size * _DRAWS_PER_PROMPT} drawn for training; this task has too few different questions: lower "
                    "data.eval_size, or widen the task with rollout.environment.args"
                ]
            )
        return train

    @staticmethod
    def _prompt(prompt_id: str, entry: dict[str, Any]) -> Prompt:
        return Prompt(prompt_id, entry["question"], entry["answer"], {"entry": entry})

    @staticmethod
    def _dataset(task: str, args: Mapping[str, Any], *, size: int, seed: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if task not in DATASETS:
            close = difflib.get_close_matches(task, DATASETS, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError([f"rollout.environment.kind: reasoning-gym has no task {task!r}{hint}"])
        settings = [field.name for field in dataclasses.fields(DATASETS[task][1])]
        unknown = [name for name in args if name not in settings]
        if unknown:
            raise ConfigError([_unknown_argument(name, task, settings) for name in unknown])
        try:
            return reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
        except Exception as error:  # tasks check their settings each in its own way
            reason = f"{task} does not take these values: {error_text(error)}"
            raise ConfigError([f"rollout.environment.args: {reason}"]) from error


def _entry(dataset: Any, index: int, task: str) -> dict[str, Any]:
    """One entry; bad settings that a task does not check show only when it uses them."""
    try:
        return dataset[index]  # type: ignore[no-any-return]
    except Exception as error:
        reason = f"{task} cannot make a prompt with these values: {named_error(error)}"
        raise ConfigError([f"rollout.environment.args: {reason}"]) from error


def _unknown_argument(name: str, task: str, settings: list[str]) -> str:
    close = difflib.get_close_matches(name, settings, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(settings)}"
    return f"rollout.environment.args.{name}: {task} has no such setting{hint}"

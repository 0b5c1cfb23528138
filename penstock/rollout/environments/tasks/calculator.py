"""`calculator`: arithmetic with a tool. The model writes `<calc>…</calc>`, sees `<result>…</result>`, and answers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence

from penstock.config.reading.environment_args import CalculatorArgs
from penstock.errors import ConfigError
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.tasks.arithmetic import ArithmeticProblem, evaluate, read_number, show
from penstock.rollout.environments.turns.multi_turn import Done, MultiTurnEnvironment, Observation, Turn
from penstock.rollout.prompts import Prompt, derive_seed

_CALL = re.compile(r"<calc>((?:(?!<calc>).)*)</calc>\s*\Z", re.DOTALL)
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)
_RESULT = "<result>{}</result>"
_PROBLEM = "error: "
_DRAWS_PER_PROMPT = 50
"""How many expressions are drawn, per prompt asked for, to find ones that differ from those held out."""


class CalculatorEnvironment(MultiTurnEnvironment):
    """A turn that ends with a call gets the calculator's result; a turn with an answer, or with neither, is the last.

    Held-out expressions are drawn first and never appear in training.
    """

    turn_ends = ("</calc>", "</answer>")

    def __init__(self, args: CalculatorArgs, *, train_size: int, eval_size: int, seed: int) -> None:
        self._args = args
        self.max_turns = args.max_turns
        held_out = self._draw("eval", eval_size, seed, frozenset())
        train = self._draw("train", train_size, seed, frozenset(prompt.text for prompt in held_out))
        self._prompts = {Split.EVAL: held_out, Split.TRAIN: train}

    @property
    def name(self) -> str:
        return "calculator"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        call = _call(turns[-1].response)
        if call is None:
            answers = _ANSWER.findall(turns[-1].response)
            return Done(self._reward(prompt, turns, answers[-1] if answers else ""))
        return Observation(_RESULT.format(_calculate(call)))

    def unfinished(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        return self._reward(prompt, turns, "")

    def sample_metrics(self, prompt: Prompt, turns: Sequence[Turn]) -> Mapping[str, float]:
        """Calls of the calculator, and those of them that it could not calculate."""
        calls = [call for turn in turns if (call := _call(turn.response)) is not None]
        failed = sum(_calculate(call).startswith(_PROBLEM) for call in calls)
        return {"tool_calls": float(len(calls)), "tool_errors": float(failed)}

    def _reward(self, prompt: Prompt, turns: Sequence[Turn], answer: str) -> float:
        number = read_number(answer)
        if number is not None and show(number) == prompt.answer:
            return self._args.correct
        understood = any(_is_understood(turn.response) for turn in turns)
        return self._args.wrong + (self._args.tool_bonus if understood else 0.0)

    def _draw(self, part: str, size: int, seed: int, taken: frozenset[str]) -> list[Prompt]:
        rng = random.Random(derive_seed(seed, "calculator", part))
        prompts: list[Prompt] = []
        problem, problems = "", 0
        for _ in range(size * _DRAWS_PER_PROMPT):
            if len(prompts) == size:
                return prompts
            expression = _expression(self._args, rng)
            text = self._args.prompt.replace("{expression}", expression)
            try:
                answer = show(evaluate(expression))
            except ArithmeticProblem as error:  # such as a division by zero that parentheses made
                problem, problems = str(error), problems + 1
                continue
            if text not in taken:
                prompts.append(Prompt(f"{part}-{len(prompts)}", text, answer, {"expression": expression}))
        if len(prompts) == size:
            return prompts
        if problems > size * _DRAWS_PER_PROMPT // 2:
            raise ConfigError(
                [
                    f"rollout.environment.args: of {size * _DRAWS_PER_PROMPT} expressions drawn {problems} cannot be "
                    f"calculated ({problem}); lower max_terms or max_digits, or remove operators"
                ]
            )
        raise ConfigError(
            [
                f"data.eval_size: held-out prompts take {len(taken)} different expressions and leave too few for "
                f"data.train_size = {size}; lower it, or widen rollout.environment.args (terms, digits, operators)"
            ]
        )


def _call(response: str) -> str | None:
    """The expression of a turn that is a call: it ends with one and has no answer."""
    call = _CALL.search(response)
    return None if call is None or _ANSWER.search(response) else call[1]


def _is_understood(response: str) -> bool:
    """Whether the turn is a call that the calculator has a result for, even if nobody will see it."""
    call = _call(response)
    return call is not None and not _calculate(call).startswith(_PROBLEM)


def _calculate(expression: str) -> str:
    try:
        return show(evaluate(expression))
    except ArithmeticProblem as problem:
        return f"{_PROBLEM}{problem}"


def _expression(args: CalculatorArgs, rng: random.Random) -> str:
    parts = list(_terms(args, rng))
    count = (len(parts) + 1) // 2
    if args.parentheses and count >= 3 and rng.random() < 0.5:
        first = rng.randrange(count - 1)
        last = rng.randrange(first + 1, count if first else count - 1)
        parts[2 * first] = f"({parts[2 * first]}"
        parts[2 * last] = f"{parts[2 * last]})"
    return "".join(parts)


def _terms(args: CalculatorArgs, rng: random.Random) -> Iterator[str]:
    for position in range(rng.randint(args.min_terms, args.max_terms)):
        if position:
            yield rng.choice(args.operators)
        digits = rng.randint(args.min_digits, args.max_digits)
        yield str(rng.randint(10 ** (digits - 1), 10**digits - 1))

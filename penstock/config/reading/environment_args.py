"""What `rollout.environment.args` may hold for the environments whose settings Penstock itself defines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from penstock.config.reading.messages import problems_of
from penstock.config.sections.base import Section

CALCULATOR_PROMPT = (
    "Calculate {expression}. You may use the calculator: write an expression as <calc>2*(3+4)</calc> and end your "
    "turn; you get <result>14</result>. Give the answer as <answer>14</answer>."
)


class MathArgs(Section):
    """Rewards of `math`."""

    correct: float = 1.0
    """Reward of an answer that equals the reference."""
    wrong: float = 0.0
    """Reward of an answer that can be parsed and does not."""
    unparsed: float = 0.0
    """Reward of a response without an answer that can be parsed."""
    undecided: float | None = None
    """Reward of a response that cannot be graded within `timeout_seconds`; unset, that is a failure of its prompt."""


class CalculatorArgs(Section):
    """Prompts, turns and rewards of `calculator`."""

    min_terms: Annotated[int, Field(ge=1, le=20)] = 2
    """Fewest numbers in an expression."""
    max_terms: Annotated[int, Field(ge=1, le=20)] = 3
    """Most numbers in an expression."""
    min_digits: Annotated[int, Field(ge=1, le=9)] = 1
    """Fewest digits of a number."""
    max_digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Most digits of a number."""
    operators: list[Literal["+", "-", "*", "/"]] = Field(default=["+", "-", "*"], min_length=1)
    """What stands between the numbers."""
    parentheses: bool = False
    """Put parentheses around a part of some expressions."""
    prompt: str = CALCULATOR_PROMPT
    """The prompt; `{expression}` stands for the expression."""
    max_turns: PositiveInt = 4
    """How many turns the model has."""
    correct: float = 1.0
    """Reward of the right answer."""
    wrong: float = 0.0
    """Reward of a wrong answer, or of none."""
    tool_bonus: float = 0.0
    """Added to `wrong` where the calculator was used and understood at least once."""

    @field_validator("prompt")
    @classmethod
    def _has_expression(cls, value: str) -> str:
        if "{expression}" not in value:
            raise ValueError("must contain {expression}")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> CalculatorArgs:
        for name in ("terms", "digits"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                raise ValueError(f"min_{name}: {low} is more than max_{name} = {high}")
        return self


ENVIRONMENT_ARGS: dict[str, type[Section]] = {"math": MathArgs, "calculator": CalculatorArgs}
"""By kind of environment."""


def wrong_args(kind: str, args: dict[str, Any]) -> list[str]:
    """One line for each of `args` that the environment does not take."""
    section = ENVIRONMENT_ARGS.get(kind)
    if section is None:
        return []
    try:
        section.model_validate(args)
    except ValidationError as error:
        return [f"rollout.environment.args.{line}" for line in problems_of(error, section)]
    return []

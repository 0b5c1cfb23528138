"""The calculator: safe arithmetic, a tool that the model sees and is not trained on, rewards."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.reading.environment_args import CalculatorArgs
from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import ConfigError
from penstock.rollout.environments import Prompt, Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.tasks.arithmetic import ArithmeticProblem, evaluate, read_number, show
from penstock.rollout.environments.tasks.calculator import CalculatorEnvironment
from tests.rollout.talking import Talker


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *(("12*34", "408"), ("2*(3+4) - 1", "13"), ("-3--4", "1"), ("1/3", "0.333333"), ("0.1+0.2", "0.3")),
        *(
            ("7/7", "1"),
            ("-2/3", "-0.666667"),
            ("0-1/99999999", "0"),
            ("(9007199254740993*2+1)/2", "9007199254740993.5"),
        ),
        ("12345678901234567.5*2", "24691357802469135"),
        (".5+1.", "1.5"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert show(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "a+1", "1 2", "1e9", "012", "1;2", "[1]", "1,2", "(1)(2)", "2**99999999", "7//2", "1/0", "1/(2-2)"),
        *("__import__('os')", "1if 1else 2", "9" * 40, "9" * 29 + "*99", "1+" * 150 + "1", "(" * 90),
    ],
)
def test_anything_else_is_a_problem_told_to_the_model(expression: str) -> None:
    with pytest.raises(ArithmeticProblem):
        evaluate(expression)


@given(st.text(max_size=40))
def test_no_text_breaks_the_calculator(text: str) -> None:
    with contextlib.suppress(ArithmeticProblem):
        assert isinstance(evaluate(text), Fraction)


@given(
    st.lists(st.integers(-999, 999), min_size=1, max_size=6), st.lists(st.sampled_from("+-*"), min_size=5, max_size=5)
)
def test_the_calculator_agrees_with_python(numbers: list[int], operators: list[str]) -> None:
    expression = str(numbers[0]) + "".join(f"{o}{n}" for o, n in zip(operators, numbers[1:], strict=False))
    assert evaluate(expression) == eval(expression)
    assert read_number(show(evaluate(expression))) == evaluate(expression)


def environment(seed: int = 0, train_size: int = 50, eval_size: int = 20, **args: Any) -> CalculatorEnvironment:
    settings = CalculatorArgs(prompt="{expression}=", **args)
    return CalculatorEnvironment(settings, train_size=train_size, eval_size=eval_size, seed=seed)


def test_prompts_follow_the_seed_and_held_out_ones_never_train() -> None:
    made = environment(max_terms=2, max_digits=1, operators=["*"])
    train, held_out = made.prompts(Split.TRAIN), made.prompts(Split.EVAL)
    assert (len(train), len(held_out)) == (50, 20)
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert train == environment(max_terms=2, max_digits=1, operators=["*"]).prompts(Split.TRAIN)
    assert train != environment(1, max_terms=2, max_digits=1, operators=["*"]).prompts(Split.TRAIN)
    assert all(prompt.answer == str(eval(prompt.facts["expression"])) for prompt in train)


def test_too_few_expressions_for_what_is_asked_are_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_size: held-out prompts take 9 different"):
        environment(eval_size=900, min_terms=1, max_terms=1, max_digits=1)


def test_expressions_that_are_too_large_are_named_as_that() -> None:
    match = r"rollout\.environment\.args: of 1000 expressions drawn 1000 cannot be calculated \(too large\)"
    with pytest.raises(ConfigError, match=match):
        environment(min_terms=9, max_terms=9, min_digits=9, max_digits=9, operators=["*"])


def test_every_answer_can_be_given() -> None:
    prompts = environment(min_terms=4, max_terms=4, max_digits=9, operators=["/", "-"]).prompts(Split.TRAIN)
    assert all(show(number) == p.answer for p in prompts if (number := read_number(p.answer)) is not None)
    assert all(read_number(prompt.answer) is not None for prompt in prompts)


def test_division_and_parentheses_appear_where_asked_for() -> None:
    prompts = environment(min_terms=3, max_terms=4, operators=["/", "-"], parentheses=True).prompts(Split.TRAIN)
    assert any("(" in prompt.text for prompt in prompts)
    assert any("." in prompt.answer for prompt in prompts)
    assert all(prompt.text.count("(") == prompt.text.count(")") for prompt in prompts)


PROMPT = Prompt("1", "12*34=", "408")


async def play(*turns: str, **args: Any) -> tuple[Any, Talker]:
    said = iter(turns)
    talker = Talker(lambda text: next(said))
    return await environment(**args).run(PROMPT, talker.handle()), talker


async def test_the_model_asks_sees_the_result_and_answers() -> None:
    trajectory, talker = await play("<calc>12*34</calc>", "<answer>408</answer>")
    texts = [(s.generation is not None, talker.tokens.decode(s.token_ids)) for s in trajectory.segments]
    assert texts == [
        (False, "12*34="),
        (True, "<calc>12*34</calc>"),
        (False, "<result>408</result>"),
        (True, "<answer>408</answer>"),
    ]
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["<answer>408</answer>"], 1.0),
        (["<answer> 408.0 </answer>"], 1.0),
        (["<answer>407</answer>"], -1.0),
        (["<answer>12*34</answer>"], -1.0),
        (["408"], -1.0),
        (["<calc>12*34</calc>", "<answer>1</answer>"], -0.75),
        (["<calc>12*</calc>", "<answer>1</answer>"], -1.0),
        (["<calc>12*34</calc> and so on", "unheard"], -1.0),
        (["<calc>12*34</calc>"] * 2, -0.75),
        (["<calc>1/0</calc>", "<calc>12*34</calc>"], -0.75),
        (["<answer>1</answer><calc>12*34</calc>"], -1.0),
        (["<calc>1</calc><answer>408</answer>"], 1.0),
        (["<answer>4</answer> no <answer>408</answer>"], 1.0),
    ],
)
async def test_rewards(turns: list[str], reward: float) -> None:
    trajectory, _ = await play(*turns, max_turns=2, wrong=-1.0, tool_bonus=0.25)
    assert trajectory.reward == reward


@pytest.mark.parametrize(
    ("turns", "counts"),
    [
        (["<answer>408</answer>"], (1, 0, 0)),
        (["<calc>12*34</calc>", "<answer>408</answer>"], (2, 1, 0)),
        (["<calc>1/0</calc>", "<calc>12*34</calc>"], (2, 2, 1)),
        (["<answer>1</answer><calc>12*34</calc>"], (1, 0, 0)),
    ],
)
async def test_turns_and_calls_are_counted(turns: list[str], counts: tuple[int, int, int]) -> None:
    trajectory, _ = await play(*turns, max_turns=2)
    assert trajectory.metrics == dict(zip(("turns", "tool_calls", "tool_errors"), counts, strict=True))


async def test_a_problem_is_told_and_the_model_goes_on() -> None:
    trajectory, talker = await play("<calc>1/0</calc>", "<answer>408</answer>")
    assert talker.tokens.decode(trajectory.segments[2].token_ids) == "<result>error: division by zero</result>"
    assert trajectory.reward == 1.0


async def test_the_factory_bounds_it_and_fills_in_sizes() -> None:
    made = make_environment(EnvironmentConfig(kind="calculator"), DataConfig(eval_size=3), seed=0)
    assert len(made.prompts(Split.TRAIN)) == 1024
    said = iter(["<calc>1+1</calc>", "<answer>2</answer>"])
    talker = Talker(lambda text: next(said))
    prompt = made.prompts(Split.EVAL)[0]
    assert "<calc>" in prompt.text
    assert len((await made.run(prompt, talker.handle())).segments) == 4
    await made.close()

"""The math environment: answers graded by math-verify, in processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import EnvironmentFailure, EnvironmentTimeout, SetupError
from penstock.rollout.environments import Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.tasks.math import reference_text
from penstock.rollout.environments.tasks.math_grading import grade
from tests.rollout.talking import Talker


@pytest.mark.parametrize(
    ("reference", "response", "outcome"),
    [
        ("42", "The answer is 42", "correct"),
        ("1/2", r"so it is \boxed{\frac12}", "correct"),
        (r"\frac{1}{2}", "0.5", "correct"),
        (r"12\pi", r"$12\pi$", "correct"),
        (r"12\pi", "12", "wrong"),
        ("x^2+1", "$1+x^2$", "correct"),
        (r"thus \boxed{7}", "7", "correct"),
        ("Half of 48 is 48/2 = <<48/2=24>>24.\nIn all 48+24 = 72.\n#### 72", "72", "correct"),
        ("He earns 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "it is 24", "wrong"),
        ("42", "41", "wrong"),
        ("2.5e-3", "0.0025", "correct"),
        ("2.5e-3", "It is 2.5E-3.", "correct"),
        ("2.5e-3", "0.25", "wrong"),
        ("1e16", "$10^{16}$", "correct"),
        ("10000000000000000", "1e+16", "correct"),
        ("2e", "$2e$", "correct"),
        ("42", "no idea", "unparsed"),
        ("42", "", "unparsed"),
    ],
)
def test_answers_are_compared_as_math_expressions(reference: str, response: str, outcome: str) -> None:
    assert grade(reference, response) == outcome


def make(folder: Path, rows: list[dict[str, Any]], seconds: float = 20, **args: float) -> Any:
    file = folder / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = EnvironmentConfig(kind="math", args=args, timeout_seconds=seconds, workers=1)
    return make_environment(config, DataConfig(train_path=str(file)), seed=0)


async def test_rewards_are_those_of_the_settings_and_a_response_that_never_ends_is_given_up(tmp_path: Path) -> None:
    rows = [{"prompt": "6*7?", "answer": 42}, {"prompt": "?", "answer": " "}]
    environment = make(tmp_path, rows, correct=2.0, wrong=-1.0, unparsed=-2.0)
    question, nonsense = environment.prompts(Split.TRAIN)
    for response, reward in (("it is 42", 2.0), ("43", -1.0), ("dunno", -2.0)):
        trajectory = await environment.run(question, Talker(lambda text, r=response: r).handle())
        assert (trajectory.reward, trajectory.response_text) == (reward, response)
        assert [segment.generation is not None for segment in trajectory.segments] == [False, True]
    with pytest.raises(EnvironmentFailure, match=r"reference answer ' ' cannot be parsed .*data\.answer_key"):
        await environment.run(nonsense, Talker(lambda text: "1").handle())
    environment._pool._processes._timeout = 0.3
    with pytest.raises(EnvironmentTimeout):
        await environment.run(question, Talker(lambda text: "9**9**9**9").handle())
    await environment.close()


async def test_a_response_that_cannot_be_graded_in_time_has_the_reward_that_is_set_for_it(tmp_path: Path) -> None:
    environment = make(tmp_path, [{"prompt": "6*7?", "answer": 42}], correct=2.0, undecided=-3.0)
    [question] = environment.prompts(Split.TRAIN)
    assert (await environment.run(question, Talker(lambda text: "42").handle())).reward == 2.0
    environment._pool._processes._timeout = 0.3
    trajectory = await environment.run(question, Talker(lambda text: r"\boxed{9^{9^{9}}}").handle())
    assert (trajectory.reward, trajectory.response_text) == (-3.0, r"\boxed{9^{9^{9}}}")
    await environment.close()


@pytest.mark.parametrize(
    ("answer", "text"), [(1e-07, "0.0000001"), (1e16, "10000000000000000"), (0.1, "0.1"), (-3, "-3"), (r"\pi", r"\pi")]
)
def test_numbers_are_written_with_all_their_digits(answer: Any, text: str) -> None:
    assert reference_text(answer) == text


@pytest.mark.parametrize("answer", [None, "", ["4"], True, float("nan")])
def test_a_prompt_without_a_reference_answer_is_refused_at_setup(tmp_path: Path, answer: Any) -> None:
    with pytest.raises(SetupError, match=r"data\.train_path: prompt 2 has no reference answer.*data\.answer_key"):
        make(tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}])

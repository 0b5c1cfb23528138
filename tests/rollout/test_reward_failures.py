"""Reward functions that fail or return what is no reward: the cause, the traceback, and the response it is about."""

from __future__ import annotations

import asyncio
import os

import pytest

from penstock.controller.failures.classify import classify
from penstock.errors import EnvironmentFailure, EnvironmentTimeout, FailureKind, WrongReward
from tests.rollout.scored import HERE, Make, line_of, played, played_group
from tests.support import column_rewards


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("nan", "the reward of prompt first is nan, which is not a number"),
        ("none", "the reward of prompt first is None, not a number"),
        ("text", "the reward of prompt first is '1.0', not a number"),
        ("no reward", r"is a mapping without the key 'reward' \(it has accuracy\); return a number, or"),
        ("empty", r"is a mapping without the key 'reward' \(it is empty\)"),
        ("nan component", "the component 'form' of prompt first is nan, not a finite number"),
        ("text component", "the component 'form' of prompt first is 'good', not a finite number"),
        ("none component", "the component 'form' of prompt first is None, not a finite number"),
        ("number as name", "a component of prompt first has the name 7; names are texts"),
        ("list", r"the reward of prompt first is \[1.0, 2.0\], not a number"),
    ],
)
async def test_what_is_no_reward_is_the_datas_failure(make_once: Make, kind: str, match: str) -> None:
    with pytest.raises(WrongReward, match=match) as caught:
        await played(make_once("odd", args={"kind": kind}))
    assert classify(caught.value) is FailureKind.DATA
    assert (caught.value.response, caught.value.trace) == ("5", None)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("nan", "returned nan"),
        ("none", "returned None"),
        ("text", "returned a value of type str"),
        ("no reward", "returned a mapping without the key 'reward'"),
        ("nan component", "the component 'form' is not a finite number"),
        ("list", "returned a list, but is not `batched: true`"),
    ],
)
async def test_a_wrong_return_is_a_cause_of_its_function_and_kind(make: Make, kind: str, problem: str) -> None:
    with pytest.raises(WrongReward) as caught:
        await played(make("odd", args={"kind": kind}))
    assert caught.value.cause == f"{HERE}:odd: {problem}"
    assert f"{HERE}:odd: " in str(caught.value)
    assert ("batched: true" in str(caught.value)) is (kind == "list")


async def test_a_dead_process_is_a_cause_of_the_function_it_ran(make_once: Make) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        await played(make_once("dying"))
    assert caught.value.cause == f"{HERE}:dying: its process ended with code 7"
    assert f"{HERE}:dying" in str(caught.value)


async def test_a_reward_that_takes_too_long_is_a_cause_of_its_function(make: Make) -> None:
    with pytest.raises(EnvironmentTimeout) as caught:
        await played(make("endless", timeout=0.2))
    assert caught.value.cause == f"{HERE}:endless: took longer than rollout.environment.timeout_seconds"


async def test_a_wrong_value_for_a_group_is_about_the_response_it_stands_for(make: Make) -> None:
    with pytest.raises(WrongReward) as caught:
        await played_group(make([{"import_path": f"{HERE}:one_is_none", "batched": True}]), "5", "six", "7")
    assert (caught.value.sample, caught.value.response) == (1, "six")
    assert caught.value.cause == f"{HERE}:one_is_none: returned None"


async def test_what_fails_for_a_whole_group_is_about_no_single_response(make: Make) -> None:
    for name in ("raising_in_a_group", "too_few"):
        with pytest.raises(EnvironmentFailure) as caught:
            await played_group(make([{"import_path": f"{HERE}:{name}", "batched": True}]), "5", "six")
        assert (caught.value.sample, caught.value.response) == (None, None)


async def test_a_batched_function_that_forgets_a_response_is_a_failure(make_once: Make) -> None:
    with pytest.raises(WrongReward, match="returned a list of 1 for 2 responses to prompt first"):
        await played_group(make_once([{"import_path": f"{HERE}:too_few", "batched": True}]), "5", "6")


async def test_a_reward_that_raises_leaves_a_traceback_of_the_users_code(make: Make) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        await played(make("raising"), "seven")
    failure, file, line = caught.value, column_rewards.__file__, line_of(column_rewards.RAISES_AT)
    assert f"raised KeyError: 'no such unit' (column_rewards.py, line {line}, in convert)" in str(failure)
    assert failure.response == "seven"
    assert failure.trace is not None
    assert failure.trace.cause == f"KeyError at {file}:{line} in convert"
    assert failure.trace.traceback == (
        "Traceback (most recent call last):\n"
        f'  File "{file}", line {line_of("return convert(response)")}, in raising\n    return convert(response)\n'
        f'  File "{file}", line {line}, in convert\n    {column_rewards.RAISES_AT}\n'
        "KeyError: 'no such unit'\n"
    )


async def test_a_group_that_raises_tells_the_cause_of_the_cause(make: Make) -> None:
    environment = make([{"import_path": f"{HERE}:raising_in_a_group", "batched": True}])
    with pytest.raises(EnvironmentFailure) as caught:
        await played_group(environment, "5", "6")
    assert caught.value.sample is None
    assert caught.value.trace is not None
    text = caught.value.trace.traceback
    assert (
        text.index("KeyError: 'no such unit'") < text.index("This led to:") < text.index("ValueError: the group has no")
    )
    assert "asyncio" not in text
    assert f"{os.sep}penstock{os.sep}rollout" not in text


async def test_an_error_that_a_library_wraps_counts_by_the_users_line() -> None:
    import json.decoder

    from penstock.rollout.environments.rewards.errors import raised_by_user

    def convert_number(text: str) -> float:
        raise KeyError(text)

    try:
        try:
            json.loads("1.5", parse_float=convert_number)
        except KeyError as error:
            json.loads("{", object_hook=error.with_traceback(error.__traceback__))  # type: ignore[arg-type]
    except json.JSONDecodeError as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        trace = raised_by_user("it", error).trace
    assert trace is not None
    assert trace.cause.endswith("in convert_number")
    assert trace.cause.startswith("JSONDecodeError at ")


async def test_the_frames_of_a_deep_recursion_are_cut() -> None:
    from penstock.rollout.environments.rewards.errors import raised_by_user

    def dive(depth: int) -> None:
        if depth == 0:
            raise RuntimeError("bottom " + "x" * 100_000)
        dive(depth - 1)

    try:
        dive(400)
    except RuntimeError as error:
        trace = raised_by_user("it", error).trace
    assert trace is not None
    assert len(trace.traceback) < 10_000
    assert "frames …" in trace.traceback
    assert "RuntimeError: bottom" in trace.traceback


async def test_code_in_a_text_counts_by_the_line_that_runs_it() -> None:
    from penstock.rollout.environments.rewards.errors import raised_by_user

    causes = set()
    for lines in range(3):
        try:
            exec("\n" * lines + "1 / 0")
        except ZeroDivisionError as error:
            trace = raised_by_user("it", error).trace
            assert trace is not None
            causes.add(trace.cause)
            assert 'File "<string>"' in trace.traceback
    assert len(causes) == 1


async def test_one_failing_sample_of_a_group_is_named(make_once: Make) -> None:
    environment = make_once(
        [{"import_path": f"{HERE}:ranked", "batched": True}, {"import_path": f"{HERE}:raising"}],
    )
    with pytest.raises(EnvironmentFailure) as caught:
        await played_group(environment, "5", "6")
    assert caught.value.sample in (0, 1)
    assert caught.value.response in ("5", "6")
    await asyncio.sleep(0)

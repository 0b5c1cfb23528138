"""What reward functions are given, and what they may give back."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.controller.failures.classify import classify
from penstock.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout, FailureKind, WrongReward
from penstock.rollout.environments import Prompt, Split, Trajectory
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.function import GroupFunctionEnvironment
from penstock.rollout.environments.rewards.scores import Score, weighted_score
from penstock.rollout.prompt_room import PromptRoom
from tests.rollout.talking import CHAT, Talker, tokenizer
from tests.support import column_rewards

HERE = "tests.support.column_rewards"
RECORD = {"question": "2+3?", "solution": "5", "difficulty": 3, "unit": "km", "id": "first"}
Make = Callable[..., Any]


@pytest.fixture(params=[False, True], ids=["in a process", "in this process"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """An environment over records, with one function by its name or several as settings."""
    return maker(tmp_path, in_process=request.param)


@pytest.fixture
def make_once(tmp_path: Path) -> Make:
    return maker(tmp_path, in_process=False)


def maker(folder: Path, *, in_process: bool) -> Make:
    def made(
        rewards: str | list[dict[str, Any]],
        *records: dict[str, Any],
        args: dict[str, Any] | None = None,
        timeout: float = 30,
        **data: Any,
    ) -> Any:
        file = folder / "d.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records or (RECORD,)), encoding="utf-8")
        named: dict[str, Any] = (
            {"rewards": rewards} if isinstance(rewards, list) else {"import_path": f"{HERE}:{rewards}"}
        )
        config = EnvironmentConfig.model_validate(
            {
                "kind": "function",
                "workers": 1,
                "in_process": in_process,
                "args": args or {},
                "timeout_seconds": timeout,
                **named,
            }
        )
        keys = {"prompt_key": "question", "answer_key": "solution"} | data
        return make_environment(config, DataConfig(train_path=str(file), **keys), seed=0)

    return made


async def played(environment: Any, response: str = "5", template: str | None = None) -> Trajectory:
    """One sample of the first prompt."""
    prompt = environment.prompts(Split.TRAIN)[0]
    try:
        return await environment.run(prompt, Talker(lambda text: response, tokenizer(template)).handle())
    finally:
        await environment.close()


async def played_group(environment: Any, *responses: str) -> list[Trajectory]:
    """The samples of a group of the first prompt."""
    prompt = environment.prompts(Split.TRAIN)[0]
    handles = [Talker(lambda text, said=said: said).handle() for said in responses]
    try:
        return await environment.run_group(prompt, handles)
    finally:
        await environment.close()


async def test_columns_reach_the_parameters_of_their_names(make: Make) -> None:
    assert (await played(make("by_column"))).reward == 13.0


async def test_a_function_with_columns_gets_all_there_is(make: Make) -> None:
    trajectory = await played(make("everything", args={"bonus": 2}))
    given = {"prompt", "messages", "rendered_prompt", "response", "response_ids", "answer"}
    assert trajectory.reward == len({*given, *RECORD, "bonus"})
    assert trajectory.components["difficulty"] == 3.0
    assert trajectory.components["bonus"] == 2.0
    assert trajectory.components["question"] == trajectory.components["prompt"] == 4.0


async def test_prompt_messages_and_rendered_prompt_are_what_they_say(make: Make) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    environment = make("seen", RECORD | {"question": chat}, chat_template=True)
    trajectory = await played(environment, template=CHAT)
    assert set(trajectory.components.values()) == {1.0}
    assert len(trajectory.components) == 5


async def test_a_column_with_a_name_of_ours_does_not_hide_ours(make_once: Make) -> None:
    environment = make_once("exact", RECORD | {"response": "6", "answer": "7"})
    assert (await played(environment)).reward == 1.0, "the model's response, and the answer of data.answer_key"


async def test_args_stand_before_columns(make_once: Make) -> None:
    assert (await played(make_once("by_column", args={"difficulty": 4}))).reward == 14.0


async def test_a_column_that_some_records_have_needs_a_default(make: Make) -> None:
    with_hint, without = RECORD | {"hint": "think", "id": "a"}, RECORD | {"id": "b"}
    assert (await played(make("with_default", with_hint, without))).reward == 5.0
    assert (await played(make("with_default", without, with_hint))).reward == 4.0
    with pytest.raises(ConfigError, match="without a default, and the record of prompt b has no such column; give"):
        make("later", RECORD | {"id": "a"}, {"question": "?", "id": "b"}, answer_key="answer")


@pytest.mark.parametrize(
    ("function", "args", "match"),
    [
        (
            "later",
            {},
            rf"rollout\.environment\.import_path: {HERE}:later has a parameter 'unit' without a default, and nothing "
            r"supplies it: it is neither a column that every record of the data has \(question, solution, unitt, id\), "
            r"nor in rollout\.environment\.args \(nothing\), nor one of prompt, .*; did you mean unitt\?",
        ),
        (
            "exact",
            {"bonus": 1},
            rf"args\.bonus: {HERE}:exact has no parameter of this name \(it has resp",
        ),
        ("exact", {"response": 1}, r"args\.response: every reward function is given 'response'; use another name"),
    ],
)
def test_what_nothing_supplies_is_found_at_the_start(
    make: Make, function: str, args: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make(function, {"question": "?", "solution": "5", "unitt": "km", "id": "a"}, args=args)


async def test_a_column_that_cannot_cross_keeps_only_functions_that_ask_for_it_here(tmp_path: Path) -> None:
    import datetime as dt

    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "?", "solution": "5", "span": dt.timedelta(seconds=3)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    data = DataConfig(train_path=str(tmp_path / "d.parquet"), prompt_key="question", answer_key="solution")
    for name, processes in (("exact", 1), ("everything", 0)):
        config = EnvironmentConfig(kind="function", import_path=f"{HERE}:{name}", workers=1)
        environment: Any = make_environment(config, data, seed=0)
        if processes:
            assert (await played(environment)).reward == 1.0
        assert environment._pool.in_process is not bool(processes)
        await environment.close()


async def test_async_functions_get_columns_too(make: Make) -> None:
    assert (await played(make("later"))).reward == 2.0


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


REWARDS = [
    {"import_path": f"{HERE}:exact", "weight": 2.0},
    {"import_path": f"{HERE}:short", "weight": 0.5, "name": "brief", "args": {"limit": 3}},
]


async def test_several_functions_are_summed_with_their_weights(make: Make) -> None:
    environment = make(REWARDS)
    assert environment.name == "function:exact+brief"
    trajectory = await played(environment)
    assert trajectory.reward == 2.5
    assert trajectory.components == {"exact": 1.0, "brief": 1.0, "brief/characters": 1.0}
    trajectory = await played(make(REWARDS), "five")
    assert trajectory.reward == 0.0
    assert trajectory.components == {"exact": 0.0, "brief": 0.0, "brief/characters": 4.0}


async def test_several_functions_share_one_process_while_they_are_looked_at(make_once: Make) -> None:
    environment = make_once(REWARDS)
    [worker] = environment._pool._processes._workers
    assert len(worker.loaded) == 2
    await environment.close()


def test_a_process_that_looked_at_a_wrong_function_is_ended(make_once: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.rollout.environments.rewards import process_pool

    started: list[Any] = []
    real = process_pool.RewardProcess
    monkeypatch.setattr(process_pool, "RewardProcess", lambda home: started.append(real(home)) or started[-1])
    with pytest.raises(ConfigError, match="'unit'"):
        make_once("later", {"question": "?", "solution": "5"})
    [process] = started
    assert process._process.wait(timeout=10) != 0


def test_a_sum_that_no_row_can_hold_is_a_failure() -> None:
    parts = [("a", 1e38, Score(1e38)), ("b", 1.0, Score(1.0))]
    with pytest.raises(WrongReward, match="larger than a 32-bit number"):
        weighted_score(parts, Prompt("7", "?"))


async def test_a_batched_function_gets_the_group_at_once(make: Make) -> None:
    environment = make([{"import_path": f"{HERE}:ranked", "batched": True}, {"import_path": f"{HERE}:exact"}])
    assert isinstance(environment, GroupFunctionEnvironment)
    group = await played_group(environment, "5", "five", "six or 5")
    assert [each.reward for each in group] == pytest.approx([1 / 3 + 1, 2 / 3, 1.0])
    assert [each.components["exact"] for each in group] == [1.0, 0.0, 0.0]
    assert [each.response_text for each in group] == ["5", "five", "six or 5"]


async def test_a_batched_function_may_be_async_and_return_components_or_an_array(make: Make) -> None:
    rewards = [{"import_path": f"{HERE}:{name}", "batched": True} for name in ("ranked_later", "ranked_array")]
    first, second = await played_group(make(rewards), "5", "five")
    assert first.components["ranked_later/size"] == 2.0
    assert first.components["ranked_later"] == second.components["ranked_later"], "one call, in one process"
    assert (first.components["ranked_array"], second.components["ranked_array"]) == (1.0, 4.0)


async def test_in_an_evaluation_a_batched_function_gets_lists_of_one(make: Make) -> None:
    rewards = [{"import_path": f"{HERE}:{name}", "batched": True} for name in ("ranked", "ranked_array")]
    trajectory = await played(make(rewards), "five")
    assert trajectory.components == {"ranked": 1.0, "ranked_array": 4.0}


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


async def test_the_rendered_prompt_is_what_the_model_saw_of_a_prompt_that_was_cut(make: Make) -> None:
    environment = make("prompt_length", RECORD | {"question": "0123456789" * 20})
    [prompt] = environment.prompts(Split.TRAIN)
    talker = Talker(lambda text: "5")
    handle = talker.handle()
    handle.room = PromptRoom(context=handle.sampling.max_new_tokens + 10, truncates=True)
    try:
        trajectory = await environment.run(prompt, handle)
    finally:
        await environment.close()
    assert trajectory.reward == 10.0


async def test_a_batched_function_that_forgets_a_response_is_a_failure(make_once: Make) -> None:
    with pytest.raises(WrongReward, match="returned a list of 1 for 2 responses to prompt first"):
        await played_group(make_once([{"import_path": f"{HERE}:too_few", "batched": True}]), "5", "6")


def line_of(text: str) -> int:
    """Where the text stands in the module of rewards."""
    lines = inspect.getsource(column_rewards).splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip() == text)


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

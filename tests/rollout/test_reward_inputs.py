"""What reward functions are given, and what they may give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.config.sections.rollout import EnvironmentConfig
from penstock.errors import ConfigError, WrongReward
from penstock.rollout.environments import Prompt, Split
from penstock.rollout.environments.factory import make_environment
from penstock.rollout.environments.rewards.function import GroupFunctionEnvironment
from penstock.rollout.environments.rewards.scores import Score, weighted_score
from penstock.rollout.prompt_room import PromptRoom
from tests.rollout.scored import HERE, RECORD, Make, played, played_group
from tests.rollout.talking import CHAT, Talker


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

"""The order of visits."""

from __future__ import annotations

from datetime import date
from types import MappingProxyType
from typing import Any

import pytest

from penstock.errors import SetupError
from penstock.rollout.prompts import Prompt, PromptStream, derive_seed


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), f"prompt {i}") for i in range(count)]


def test_every_epoch_visits_every_prompt_once_in_a_new_order() -> None:
    visits = list(PromptStream(prompts(50), epochs=2, shuffle=True, seed=3))
    first, second = visits[:50], visits[50:]
    assert sorted(v.prompt.prompt_id for v in first) == sorted(v.prompt.prompt_id for v in second)
    assert [v.prompt for v in first] != [v.prompt for v in second]
    assert len({v.key for v in visits}) == 100


def test_the_order_follows_the_seed_alone() -> None:
    def order(seed: int) -> list[str]:
        return [v.prompt.prompt_id for v in PromptStream(prompts(20), epochs=1, shuffle=True, seed=seed)]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(
    "change",
    [
        {"answer": "8"},
        {"answer": 7},
        {"facts": {"level": 2, "day": date(2020, 1, 1)}},
        {"facts": {"level": 1, "day": date(2020, 1, 2)}},
        {"messages": ({"role": "system", "content": "3+4="},)},
    ],
)
def test_the_digest_is_of_all_that_the_data_say(change: dict[str, Any]) -> None:
    def digest(**changes: Any) -> str:
        facts = MappingProxyType({"day": date(2020, 1, 1), "level": 1})
        content = {"answer": "7", "facts": facts, "messages": ({"role": "user", "content": "3+4="},)} | changes
        return PromptStream([Prompt("1", "3+4=", **content)], epochs=1, shuffle=False, seed=0).digest

    assert digest(facts={"level": 1, "day": date(2020, 1, 1)}) == digest()
    assert digest(**change) != digest()


def test_the_answers_of_generated_prompts_may_differ_from_process_to_process() -> None:
    streams = [
        PromptStream([Prompt("1", "a word ladder", answer)], epochs=1, shuffle=False, seed=0, generated=True)
        for answer in ("COLD,CORD,WORD", "COLD,WOLD,WORD")
    ]
    assert streams[0].digest == streams[1].digest


def test_objects_of_an_environment_do_not_make_the_digest_another_in_each_process() -> None:
    def digest() -> str:
        odd = [Prompt("1", "a", facts={"task": object()}), Prompt("2", "b", facts={1: 2, "x": {"b", "a"}})]
        return PromptStream(odd, epochs=1, shuffle=False, seed=0).digest

    kept = object()  # so that the second one lies at another address
    assert digest() == digest(), kept


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(SetupError, match="empty"):
        PromptStream([], epochs=1, shuffle=False, seed=0)


def test_seeds_differ_by_every_part_and_never_change() -> None:
    assert derive_seed(0, 1, "p", 2) == 4971889210408506826
    assert len({derive_seed(0, e, p, i) for e in range(3) for p in "ab" for i in range(4)}) == 24

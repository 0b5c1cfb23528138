"""The order of visits."""

from __future__ import annotations

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


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(SetupError, match="empty"):
        PromptStream([], epochs=1, shuffle=False, seed=0)


def test_seeds_differ_by_every_part_and_never_change() -> None:
    assert derive_seed(0, 1, "p", 2) == 4971889210408506826
    assert len({derive_seed(0, e, p, i) for e in range(3) for p in "ab" for i in range(4)}) == 24

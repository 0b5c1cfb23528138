"""Datasets and the order of visits."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SetupError
from penstock.rollout.prompts import Prompt, PromptStream, derive_seed, read_jsonl_prompts


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


def read(path: Path, text: str, **keys: str) -> list[Prompt]:
    path.write_text(text, encoding="utf-8")
    settings = {"prompt_key": "prompt", "answer_key": "answer"} | keys
    return read_jsonl_prompts(str(path), limit=100, **settings)  # type: ignore[arg-type]


def test_records_keep_answers_ids_and_everything_else(tmp_path: Path) -> None:
    text = '{"q": "1+1", "answer": 2, "level": "easy"}\n\n{"q": "2+2", "id": "second"}\n'
    first, second = read(tmp_path / "d.jsonl", text, prompt_key="q")
    assert (first.prompt_id, first.text, first.answer, dict(first.facts)) == ("1", "1+1", 2, {"level": "easy"})
    assert (second.prompt_id, second.answer) == ("second", None)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{broken", r"d.jsonl:1: not JSON"),
        ('{"question": "1+1"}', "data.prompt_key"),
        ('["a"]', "data.prompt_key"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "same id"),
    ],
)
def test_wrong_records_say_where_and_what(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(SetupError, match=match):
        read(tmp_path / "d.jsonl", text)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SetupError, match=r"nowhere\.jsonl"):
        read_jsonl_prompts("nowhere.jsonl", prompt_key="prompt", answer_key="answer", limit=1)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SetupError, match="UTF-8"):
        read_jsonl_prompts(str(tmp_path / "d.jsonl"), prompt_key="prompt", answer_key="answer", limit=1)

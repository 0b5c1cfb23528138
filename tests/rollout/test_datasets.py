"""Prompts from JSONL, Parquet and the datasets package; what is wrong is said with its place and the setting."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.sections.data import DataConfig
from penstock.errors import SetupError
from penstock.rollout.datasets import read_prompts
from penstock.rollout.prompts import Prompt

ROWS = [{"prompt": f"{n} + {n}", "answer": str(2 * n), "level": "easy"} for n in range(5)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def saved(path: Path, rows: list[dict[str, Any]], *splits: str) -> str:
    import datasets

    data = datasets.Dataset.from_list(rows)
    (datasets.DatasetDict(dict.fromkeys(splits, data)) if splits else data).save_to_disk(path)
    return str(path)


def loadable(path: Path, rows: list[dict[str, Any]]) -> str:
    """A folder of data files, which load_dataset makes a dataset of."""
    path.mkdir()
    jsonl(path / "train.jsonl", rows)
    return str(path)


def train(path: str, **settings: Any) -> list[Prompt]:
    return read_prompts(DataConfig(train_path=path, **settings), "train")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: jsonl(folder / "d.jsonl", ROWS),
        lambda folder: parquet(folder / "d.parquet", ROWS),
        lambda folder: saved(folder / "d", ROWS),
        lambda folder: saved(folder / "d", ROWS, "train", "test"),
        lambda folder: loadable(folder / "d", ROWS),
    ],
    ids=["jsonl", "parquet", "saved dataset", "saved splits", "folder of files"],
)
def test_every_form_gives_the_same_prompts(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path)
    prompts = train(path)
    assert [p.text for p in prompts] == [row["prompt"] for row in ROWS]
    assert [p.answer for p in prompts] == [row["answer"] for row in ROWS]
    assert [p.prompt_id for p in prompts] == ["1", "2", "3", "4", "5"]
    assert dict(prompts[0].facts) == {"level": "easy"}
    assert len(train(path, train_size=2)) == 2


def test_a_file_is_read_whole_unless_a_size_is_given(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": str(n)} for n in range(1500)])
    assert len(train(path)) == 1500
    assert len(read_prompts(DataConfig(train_path=path, eval_path=path), "eval")) == 64


def test_the_ending_can_be_overruled(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "prompts.txt", ROWS)
    assert len(train(path, format="jsonl")) == 5
    with pytest.raises(SetupError, match=r"data\.train_path: .*set data\.format to jsonl or parquet"):
        train(path)
    with pytest.raises(SetupError, match=r"is a file, and data\.format = datasets reads folders and names"):
        train(path, format="datasets")
    assert len(train(jsonl(tmp_path / "PROMPTS.JSONL", ROWS))) == 5


def test_a_file_of_another_kind_says_how_it_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.csv").write_text("prompt,answer\n1+1,2\n", encoding="utf-8")
    with pytest.raises(SetupError, match="a folder with CSV or JSON files is read by the datasets package"):
        train(str(folder / "train.csv"))
    assert [prompt.text for prompt in train(str(folder))] == ["1+1"]


@pytest.mark.parametrize("write", [jsonl, parquet, saved], ids=["jsonl", "parquet", "datasets"])
def test_an_answer_key_that_no_record_has_is_refused_with_the_columns_there_are(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / f"d.{write.__name__}", ROWS)
    match = (
        r"data\.train_path: no record has a column 'anser'; set data\.answer_key to answer \(there are prompt, answer"
    )
    for size in (None, 1):
        with pytest.raises(SetupError, match=match):
            train(path, answer_key="anser", train_size=size)


def test_answers_may_be_missing_from_some_records_and_from_all_where_none_were_asked_for(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}, {"prompt": "b", "solution": "c"}])
    assert [prompt.answer for prompt in train(path)] == [None, None]
    assert [prompt.answer for prompt in train(path, answer_key="solution")] == [None, "c"]
    assert [prompt.answer for prompt in train(path, answer_key="solution", train_size=1)] == [None]


def test_only_the_rows_that_are_asked_for_are_read_from_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet

    read: list[int] = []
    batches = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        for batch in batches(self, *args, **kwargs):
            read.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    assert len(train(parquet(tmp_path / "d.parquet", ROWS), train_size=2)) == 2
    assert read == [2]


def test_records_keep_ids_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"q": "1+1", "answer": 2}\n\n{"q": "2+2", "id": "second"}\n', encoding="utf-8")
    first, second = train(str(file), prompt_key="q")
    assert (first.prompt_id, first.answer) == ("1", 2)
    assert (second.prompt_id, second.answer) == ("second", None)


@pytest.mark.parametrize("form", [jsonl, parquet])
def test_a_chat_is_kept_as_messages(tmp_path: Path, form: Any) -> None:
    path = form(tmp_path / f"d.{form.__name__}", [{"prompt": CHAT}])
    [prompt] = train(path, chat_template=True)
    assert prompt.content == tuple(CHAT)
    assert prompt.text == "Be brief.\n2+2?"
    with pytest.raises(SetupError, match=r"set data\.chat_template=true"):
        train(path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{broken", r"d\.jsonl:1: not JSON"),
        ("[" * 100_000, r"d\.jsonl:1: not JSON"),
        (
            '{"promt": "1+1", "answer": "2"}',
            r"no column 'prompt'; set data\.prompt_key to promt \(there are promt, answer",
        ),
        ('{"question": "1+1"}', r"set data\.prompt_key to one of question"),
        ('["a"]', r"is a list, not an object"),
        ('{"prompt": 3}', r"'prompt' is a int; data\.prompt_key must name text"),
        ('{"prompt": []}', r"'prompt' is a list"),
        ('{"prompt": [{"role": "user"}]}', r"no text under role and content"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', r"d\.jsonl:1 and .*d\.jsonl:2 have the same id '1'"),
        ('{"prompt": "a", "id": 2}\n{"prompt": "b"}', "same id '2'; a record without an id uses its row number"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", r"d\.jsonl:1: not JSON: .*4300 digits"),
        ('{"prompt": ""}', r"d\.jsonl:1: 'prompt' is empty"),
        ("\n", r"d\.jsonl' is empty"),
    ],
)
def test_wrong_records_say_where_and_what(tmp_path: Path, line: str, match: str) -> None:
    (tmp_path / "d.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(SetupError, match=rf"data\.train_path: .*{match}"):
        train(str(tmp_path / "d.jsonl"))


def test_files_that_are_missing_or_no_files_of_their_kind(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "folder.parquet").mkdir()
    for name, match in (
        ("none.jsonl", "does not exist"),
        ("none.parquet", "does not exist"),
        ("folder.parquet", "is a folder"),
        ("d.jsonl", r"d\.jsonl:1: the file is UTF-16"),
        ("d.parquet", "cannot be read as Parquet"),
    ):
        with pytest.raises(SetupError, match=rf"data\.train_path: .*{match}"):
            train(str(tmp_path / name))


def test_a_split_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", ROWS, "train", "validation")
    with pytest.raises(
        SetupError, match=r"no split 'valid'; set data\.eval_split to validation \(there are train, val"
    ):
        read_prompts(DataConfig(train_path=path, eval_path=path, eval_split="valid"), "eval")
    with pytest.raises(SetupError, match=r"no split 'test'; set data\.eval_split to one of train, validation"):
        read_prompts(DataConfig(train_path=path, eval_path=path), "eval")
    whole = saved(tmp_path / "whole", ROWS)
    with pytest.raises(SetupError, match=r"without splits: remove data\.train_split"):
        train(whole, train_split="train")
    with pytest.raises(SetupError, match=r"remove data\.subset"):
        train(whole, subset="main")
    with pytest.raises(SetupError, match=r"data\.train_split is 'dev'"):
        train(loadable(tmp_path / "loadable", ROWS), train_split="dev")


def test_the_hub_is_left_alone_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants as hub

    online: list[bool] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        online.append(not hub.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(SetupError, match=r"not a local dataset .*set data\.download=true"):
        train("nobody/nothing")
    monkeypatch.setattr(datasets, "load_dataset", load)
    train("nobody/nothing")
    train("nobody/nothing", download=True)
    assert online == [False, True]
    assert (hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"data\.train_path: .*pyarrow.*pip install 'pyarrow>=15'"):
        train(path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SetupError, match=r"data\.train_path: .*datasets.*pip install 'datasets>=3'"):
        train(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"d\.jsonl:2: not UTF-8 text: byte 0xff; save the file as UTF-8"),
        ('{"prompt": "a"}\n'.encode("utf-16"), r"d\.jsonl:1: the file is UTF-16 text; save it as UTF-8"),
        (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}\n", r"d\.jsonl:1: not JSON: Exceeds the limit"),
        (
            b'{"prompt": "a"}\n{"prompt": "a", "answer": ' + b"[" * 300 + b"]" * 300 + b"}",
            r"d\.jsonl:2: is nested more",
        ),
        (b"\n" + b"[" * 100_000, r"d\.jsonl:2: not JSON"),
        (b"\xef\xbb\xbf", "is empty: it has no prompts"),
    ],
    ids=["invalid", "utf-16", "digits", "nested", "too deep", "only a mark"],
)
def test_a_file_that_is_no_jsonl_is_refused_with_file_and_line(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(SetupError, match=rf"data\.train_path: .*{match}"):
        train(str(tmp_path / "d.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xef\xbb\xbfb"}')
    assert [prompt.text for prompt in train(str(tmp_path / "d.jsonl"))] == ["a", "\ufeffb"]


def test_a_row_of_parquet_that_is_not_utf8_is_refused_with_its_number(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.array([b"a", b"b", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "d.parquet")
    with pytest.raises(SetupError, match=r"data\.train_path: .*d\.parquet, row 3: cannot be read: .*utf-8"):
        train(str(tmp_path / "d.parquet"))


def test_halves_of_surrogate_pairs_are_replaced_in_every_part_of_a_record(tmp_path: Path) -> None:
    odd = {"id": "\ud800", "prompt": "a\udfff", "answer": ["\ud800"], "\ud800": {"x": "\ud800"}}
    chat = {"prompt": [{"role": "user", "content": "\ud800"}]}
    (one,) = train(jsonl(tmp_path / "d.jsonl", [odd]))
    assert (one.prompt_id, one.text, one.answer) == ("\ufffd", "a\ufffd", ["\ufffd"])
    assert (dict(one.facts), one.repaired) == ({"\ufffd": {"x": "\ufffd"}}, True)
    (two,) = train(jsonl(tmp_path / "chat.jsonl", [chat]), chat_template=True)
    assert (two.messages, two.text) == (({"role": "user", "content": "\ufffd"},), "\ufffd")
    (three,) = train(jsonl(tmp_path / "fine.jsonl", [{"prompt": "\x00\x1b 🌊"}]))
    assert (three.text, three.repaired) == ("\x00\x1b 🌊", False)

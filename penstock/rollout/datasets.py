"""Prompts from files: JSONL, Parquet and what the `datasets` package reads.

In every format, a record becomes a prompt in the same way, and errors name its place in the data and the setting to
change.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from penstock.config.sections.data import DataConfig
from penstock.errors import SetupError
from penstock.rollout.prompts import Message, Prompt
from penstock.text import cut, error_text, safe

_INSTALL = "is not installed: pip install"
_DEFAULT_SPLITS = {"train": "train", "eval": "test"}
_PARQUET_BATCH = 4096
_MESSAGE_KEYS = frozenset({"role", "content"})
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_DEEPEST = 100
"""Nesting depth of lists and objects in a record; Python's own tools give up at a few hundred."""


@dataclass(frozen=True)
class Record:
    """One row of a dataset, and how a person finds it."""

    number: int
    """Counted from 1."""
    where: str
    values: Any


def read_prompts(data: DataConfig, part: Literal["train", "eval"]) -> list[Prompt]:
    """The prompts at `data.train_path` or `data.eval_path`; none if there is no path."""
    path = data.train_path if part == "train" else data.eval_path
    if path is None:
        return []
    limit = data.train_size if part == "train" else data.eval_size
    try:
        # Closed explicitly: the file behind it stays open if only its first rows are read.
        with closing(records_of(data, path, part, limit)) as records:
            used = list(itertools.islice(records, limit))
            prompts = [_prompt(record, data) for record in used]
            if not prompts:
                raise SetupError(f"{path!r} is empty: it has no prompts")
            _check_ids(used, prompts)
            _check_answers(used, records, data)
    except SetupError as error:
        raise SetupError(f"data.{part}_path: {error}") from error.__cause__
    return prompts


def records_of(
    data: DataConfig, path: str, part: Literal["train", "eval"], limit: int | None
) -> Generator[Record, None, None]:
    """The records at `path`, one after the other; close the iterator if you do not want all of them."""
    form = data.format_of(path)
    if form == "datasets":
        split = data.train_split if part == "train" else data.eval_split
        yield from _from_datasets(data, path, split, part)
        return
    file = Path(path)
    if not os.path.isfile(file):
        other = "is a folder, not a file" if os.path.isdir(file) else "is a device, not a file"
        raise SetupError(f"{path!r} {other}" if os.path.exists(file) else f"file {path!r} does not exist")
    yield from _from_jsonl(file) if form == "jsonl" else _from_parquet(file, limit)


def _from_jsonl(file: Path) -> Iterator[Record]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{file}:{number}"
                if (text := _decoded(line, where, first=number == 1)).strip():
                    yield Record(number, where, _parse(text, where))
    except OSError as error:
        raise SetupError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error


def _decoded(line: bytes, where: str, *, first: bool) -> str:
    """A line as text; the mark that some editors put before UTF-8 is not part of it."""
    if first and line.startswith(_UTF16_MARKS):
        raise SetupError(f"{where}: the file is UTF-16 text; save it as UTF-8")
    try:
        return line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise SetupError(f"{where}: not UTF-8 text: byte 0x{line[error.start]:02x}; save the file as UTF-8") from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also an integer with more digits than Python reads
        raise SetupError(f"{where}: not JSON: {error_text(error)}") from error


def _from_parquet(file: Path, limit: int | None) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise SetupError(f"{str(file)!r} is read with pyarrow, which {_INSTALL} 'pyarrow>=15'") from error
    try:
        with parquet.ParquetFile(file) as table:
            # Read no more rows at once than requested: some hold images, or whole books.
            batches = table.iter_batches(batch_size=min(limit or _PARQUET_BATCH, _PARQUET_BATCH))
            yield from _numbered(itertools.chain.from_iterable(map(_rows, batches)), str(file))
    except (OSError, ArrowException) as error:
        raise SetupError(f"{str(file)!r} cannot be read as Parquet: {_first_line(error)}") from error


def _rows(batch: Any) -> Iterator[Any]:
    """The rows of a batch of Parquet, one at a time if one of them is not what the file says it is."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        for place in range(batch.num_rows):
            yield from batch.slice(place, 1).to_pylist()


def _from_datasets(data: DataConfig, path: str, split: str | None, part: Literal["train", "eval"]) -> Iterator[Record]:
    if os.path.isfile(path):
        raise SetupError(_no_dataset(data, path))
    try:
        import datasets
    except ImportError as error:
        raise SetupError(f"{path!r} is read with the datasets package, which {_INSTALL} 'datasets>=3'") from error
    with _quiet(datasets, offline=not data.download):
        if any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json")):
            rows = _load_saved(datasets, data, path, split, part)
        else:
            rows = _load_named(datasets, data, path, split or _DEFAULT_SPLITS[part], part)
    yield from _numbered(_read_one_by_one(rows, path), path)


def _read_one_by_one(rows: Iterable[Any], path: str) -> Iterator[Any]:
    try:
        yield from rows
    except UnicodeDecodeError:
        raise
    except Exception as error:  # the package reads files, and decodes what is in them, only as rows are asked for
        raise SetupError(f"{path!r} cannot be read: {_first_line(error)}") from error


def _no_dataset(data: DataConfig, path: str) -> str:
    if data.format == "datasets":
        return f"{path!r} is a file, and data.format = datasets reads folders and names; set it to jsonl or parquet"
    return (
        f"{path!r} ends neither in .jsonl nor in .parquet: if it is one of them, set data.format to jsonl or parquet; "
        "a folder with CSV or JSON files is read by the datasets package: give the folder instead"
    )


def _load_saved(datasets: Any, data: DataConfig, path: str, split: str | None, part: str) -> Iterable[Any]:
    if data.subset is not None:
        raise SetupError(f"{path!r} is a saved dataset, which has no subsets: remove data.subset")
    try:
        saved = datasets.load_from_disk(path)
    except Exception as error:  # the package may raise anything on files it cannot read
        raise SetupError(f"{path!r} cannot be read as a saved dataset: {_first_line(error)}") from error
    if not isinstance(saved, datasets.DatasetDict):
        if split is not None:
            raise SetupError(f"{path!r} is a saved dataset without splits: remove data.{part}_split")
        return saved  # type: ignore[no-any-return]
    wanted = split or _DEFAULT_SPLITS[part]
    if wanted not in saved:
        raise SetupError(f"{path!r} has no split {wanted!r}; set data.{part}_split to {_one_of(wanted, list(saved))}")
    return saved[wanted]  # type: ignore[no-any-return]


def _load_named(datasets: Any, data: DataConfig, path: str, split: str, part: str) -> Iterable[Any]:
    try:
        return datasets.load_dataset(path, data.subset, split=split)  # type: ignore[no-any-return]
    except Exception as error:  # the package and the network below it may raise anything
        reason = _first_line(error)
        if os.path.isdir(path):
            hint = f"it is a folder, but not one that datasets can load: {reason}"
        elif data.download:
            hint = reason
        else:
            hint = f"it is not a local dataset ({reason}); set data.download=true to look for it on the hub"
        if "split" in reason.lower():
            hint += f" (data.{part}_split is {split!r})"
        raise SetupError(f"{path!r} cannot be loaded: {hint}") from error


@contextmanager
def _quiet(datasets: Any, *, offline: bool) -> Iterator[None]:
    """Without progress bars and, if asked, without network: the packages read these switches at each use."""
    import huggingface_hub.constants as hub

    bars = datasets.are_progress_bars_disabled()
    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    if offline:
        hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
        if not bars:
            datasets.enable_progress_bars()


def _numbered(rows: Iterable[Any], source: str) -> Iterator[Record]:
    number = 0
    try:
        for number, values in enumerate(rows, start=1):
            yield Record(number, f"{source}, row {number}", values)
    except UnicodeDecodeError as error:  # text is decoded only as rows are asked for
        raise SetupError(f"{source}, row {number + 1}: cannot be read: {_first_line(error)}") from error


def _prompt(record: Record, data: DataConfig) -> Prompt:
    values = record.values
    _check_depth(record)
    if not isinstance(values, Mapping):
        raise SetupError(
            f"{record.where}: is {_kind(values)}, not an object with the prompt under a key (data.prompt_key)"
        )
    if data.prompt_key not in values:
        raise SetupError(
            f"{record.where}: has no column {data.prompt_key!r}; set data.prompt_key to "
            f"{_one_of(data.prompt_key, list(values))}"
        )
    messages = _messages(values[data.prompt_key], record.where, data)
    text = values[data.prompt_key] if messages is None else "\n".join(str(m["content"]) for m in messages)
    if not text:
        raise SetupError(f"{record.where}: {data.prompt_key!r} is empty (data.prompt_key)")
    own = (data.prompt_key, data.answer_key, "id")
    facts = MappingProxyType({key: value for key, value in values.items() if key not in own})
    name = values.get("id")
    prompt_id = str(record.number if name is None else name)
    return Prompt(prompt_id, text, values.get(data.answer_key), facts, messages, MappingProxyType(dict(values)))


def _check_depth(record: Record) -> None:
    level, depth = [record.values], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        if depth > _DEEPEST:
            raise SetupError(f"{record.where}: is nested more than {_DEEPEST} levels deep")
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]


def _messages(value: Any, where: str, data: DataConfig) -> tuple[Message, ...] | None:
    """The chat if the prompt is one, None for text."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        raise SetupError(
            f"{where}: {data.prompt_key!r} is {_kind(value)}; data.prompt_key must name text or a list of chat messages"
        )
    for message in value:
        if not all(isinstance(message.get(key), str) for key in _MESSAGE_KEYS):
            raise SetupError(f"{where}: a message of {data.prompt_key!r} has no text under role and content")
    if not data.chat_template:
        raise SetupError(f"{where}: {data.prompt_key!r} holds chat messages; set data.chat_template=true for them")
    # Parquet gives every message all keys that any message has.
    return tuple({key: item for key, item in message.items() if item is not None} for message in value)


def _check_ids(records: list[Record], prompts: list[Prompt]) -> None:
    seen: dict[str, str] = {}
    for record, prompt in zip(records, prompts, strict=True):
        if prompt.prompt_id in seen:
            raise SetupError(
                f"{seen[prompt.prompt_id]} and {record.where} have the same id {prompt.prompt_id!r}; a record without "
                "an id uses its row number: give an id to all records or to none"
            )
        seen[prompt.prompt_id] = record.where


def _check_answers(used: list[Record], others: Iterable[Record], data: DataConfig) -> None:
    """Refuse a user-set `data.answer_key` that no record has; without answers all rewards would be the same."""
    key = data.answer_key
    if key == DataConfig.model_fields["answer_key"].default or any(key in record.values for record in used):
        return
    if not any(isinstance(record.values, Mapping) and key in record.values for record in others):
        columns = list(dict.fromkeys(column for record in used for column in record.values))
        raise SetupError(f"no record has a column {key!r}; set data.answer_key to {_one_of(key, columns)}")


def _one_of(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    listed = cut(safe(", ".join(map(str, names))), 500) or "nothing: there are no columns"
    return f"{close[0]} (there are {listed})" if close else f"one of {listed}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "true or false"}
    return names.get(type(value), f"a {type(value).__name__}")


def _first_line(error: BaseException) -> str:
    lines = [line for line in error_text(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__

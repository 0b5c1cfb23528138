"""Prompts from files.

In every format, a record becomes a prompt in the same way, and errors name its place in the data and the setting to
change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any, Literal

from penstock.config.sections.data import DataConfig
from penstock.errors import SetupError
from penstock.rollout.dataset_records import Record, one_of, records_of
from penstock.rollout.prompts import Message, Prompt

_MESSAGE_KEYS = frozenset({"role", "content"})
_DEEPEST = 100
"""Nesting depth of lists and objects in a record; Python's own tools give up at a few hundred."""


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
            f"{one_of(data.prompt_key, list(values))}"
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
        raise SetupError(f"no record has a column {key!r}; set data.answer_key to {one_of(key, columns)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "true or false"}
    return names.get(type(value), f"a {type(value).__name__}")

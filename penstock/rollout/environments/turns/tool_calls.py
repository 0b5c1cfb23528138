"""Tool calls in what a model writes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the Hermes form.

Nothing here fails, no matter what a model writes: text that cannot be read or passed on is not a call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_DEEPEST = 100
"""Levels of lists and objects; packages on the way to a tool give up at a few hundred."""


class NotPassable(ValueError):
    """JSON text that cannot be read, or that could not be passed on; the message is for the model."""


@dataclass(frozen=True)
class ParsedCall:
    """One call of a tool; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ParsedCall]]:
    """The text before the first call, and the calls that can be understood; others stay text."""
    calls: list[ParsedCall] = []
    for block in _BLOCK.finditer(text):
        try:
            said = read_json(block[1])
        except NotPassable:
            continue
        if isinstance(said, dict) and isinstance(said.get("name"), str) and said["name"]:
            arguments = said.get("arguments", {})
            calls.append(ParsedCall(said["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    if not calls:
        return text, []
    return text[: text.index("<tool_call>")].strip(), calls


def read_json(text: str) -> Any:
    """What JSON text says; raises `NotPassable` for anything that would fail later on."""
    try:
        said = json.loads(text)
        # Halves of surrogate pairs, which JSON can spell, are not Unicode text.
        json.dumps(said, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise NotPassable(str(error)) from error
    if _depth(said) > _DEEPEST:
        raise NotPassable(f"more than {_DEEPEST} levels deep")
    return said


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth

"""Tool calls in what a model writes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the Hermes form."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


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
            said = json.loads(block[1])
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(said, dict) and isinstance(said.get("name"), str) and said["name"]:
            arguments = said.get("arguments", {})
            calls.append(ParsedCall(said["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)))
    if not calls:
        return text, []
    return text[: text.index("<tool_call>")].strip(), calls

"""YAML as Penstock reads and writes it: the scalars of YAML 1.2, no key twice, and nothing that grows without bound.

PyYAML reads YAML 1.1, where `1e-5` is text, `off` is false, `1:30` is ninety and `2024-01-01` is a date. Here a plain
scalar is null, true, false, a number, or text, and numbers are written as in every other language.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

from penstock.config.reading.yaml_limits import DialectError, Measure, check_count, check_depth

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|[0-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_DIGITS = "0123456789"


_MOST_DIGITS = 300
"""Of a whole number: more than any setting has, and fewer than Python or a floating-point number gives up at."""


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._nodes += 1
        check_count(self._nodes, mark)
        self._depth += 1
        check_depth(self._depth, mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_document(self, node: yaml.Node) -> Any:
        Measure().check(node)  # before anything is made of it
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, yaml.Mark] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in seen:
                first = seen[key].line + 1
                raise DialectError(
                    problem=f"duplicate key {key!r}; the first is in line {first}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _construct_null(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> None:
    _matched(node, _NULL, "null")


def _construct_bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    return _matched(node, _BOOL, "true or false").lower() == "true"


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = _matched(node, _INT, "a whole number").replace("_", "")
    if len(text) > _MOST_DIGITS:
        raise _refused(node, f"is a whole number of {len(text):,} digits; at most {_MOST_DIGITS} are read")
    if "0x" in text:
        return int(text, 16)
    return int(text, 8) if "0o" in text else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = _matched(node, _FLOAT, "a number").replace("_", "").lower()
    number = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(number) and "inf" not in text:
        raise _refused(node, "is larger than a number can be; write .inf if infinity is meant")
    return number


def _matched(node: yaml.ScalarNode, pattern: re.Pattern[str], what: str) -> str:
    """The text of a scalar, which a tag in the file may call something that it is not."""
    text = str(node.value)
    if not pattern.fullmatch(text):
        raise _refused(node, f"is not {what}, as its tag says")
    return text


def _refused(node: yaml.ScalarNode, reason: str) -> DialectError:
    text = repr(node.value if len(node.value) <= 40 else f"{node.value[:37]}...")
    return DialectError(problem=f"{text} {reason}", problem_mark=node.start_mark)


def _resolvers() -> dict[str | None, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in (
        ("bool", _BOOL, "tTfF"),
        ("int", _INT, "-+" + _DIGITS),
        ("float", _FLOAT, "-+." + _DIGITS),
        ("null", _NULL, "~nN"),
        ("merge", re.compile(r"^<<$"), "<"),
    ):
        for first in [*firsts, ""] if tag == "null" else firsts:
            table.setdefault(first, []).append((f"tag:yaml.org,2002:{tag}", pattern))
    return table


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    on_one_line = not any(isinstance(value, list | dict) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=on_one_line)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """NEL is a line break to YAML, which other quotes would fold into a space: only double quotes escape it."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)
_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_constructor("tag:yaml.org,2002:null", _construct_null)
_Loader.add_constructor("tag:yaml.org,2002:bool", _construct_bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
# The writer keeps PyYAML's own rules besides ours, so that text which either dialect would misread is put in quotes.
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_resolvers().get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_resolvers()}
}


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; raises `yaml.YAMLError`, whatever the text is, within a bounded time."""
    return yaml.load(text, Loader=_Loader)


def write_yaml(value: Any) -> str:
    """`value` as YAML in the given key order; short lists on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)

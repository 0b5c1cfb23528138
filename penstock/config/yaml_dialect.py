"""YAML as Penstock reads and writes it: the scalars of YAML 1.2, and no key twice.

PyYAML reads YAML 1.1, where `1e-5` is text, `off` is false, `1:30` is ninety and `2024-01-01` is a date. Here a plain
scalar is null, true, false, a number, or text, and numbers are written as in every other language.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0x[0-9a-fA-F]+|0o[0-7]+|[0-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)
_DIGITS = "0123456789"


class DuplicateKeyError(yaml.MarkedYAMLError):
    """A key that a mapping holds twice."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, yaml.Mark] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in seen:
                first = seen[key].line + 1
                raise DuplicateKeyError(
                    problem=f"the key {key!r} is here a second time; the first is in line {first}",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    if "0x" in text:
        return int(text, 16)
    return int(text, 8) if "0o" in text else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


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


_Dumper.add_representer(list, _represent_list)
_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
# The writer keeps PyYAML's own rules besides ours, so that text which either dialect would misread is put in quotes.
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_resolvers().get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_resolvers()}
}


def parse_yaml(text: str) -> Any:
    """The value of a YAML document; raises `yaml.YAMLError`."""
    return yaml.load(text, Loader=_Loader)


def write_yaml(value: Any) -> str:
    """`value` as YAML in the given key order; short lists on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)

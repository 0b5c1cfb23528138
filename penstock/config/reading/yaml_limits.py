"""What a YAML document may hold to be read as settings, found out before anything is made of it.

A few lines of YAML can stand for billions of values (anchors that repeat anchors), for a value that contains itself, or
for an object of any type (tags).
"""

from __future__ import annotations

import yaml

_MOST_NODES = 20_000
"""Values, names included, once every alias is written out."""
_DEEPEST = 50
"""Sections and lists inside each other."""
_CORE = "tag:yaml.org,2002:"
_TAGS: dict[type[yaml.Node], frozenset[str]] = {
    yaml.ScalarNode: frozenset(_CORE + name for name in ("null", "bool", "int", "float", "str", "merge")),
    yaml.SequenceNode: frozenset({_CORE + "seq"}),
    yaml.MappingNode: frozenset({_CORE + "map"}),
}


class DialectError(yaml.MarkedYAMLError):
    """YAML that is well formed, and that settings are not written in."""


class Measure:
    """Counts a document with its aliases written out, without writing them out.

    Each node is looked at once. Example: `[&a [x, x], *a, *a]` has 10 nodes: the outer list, and three lists of three.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        """Nodes and levels below each node, itself included."""
        self._around: set[int] = set()
        """The nodes that the one at hand is in."""

    def check(self, node: yaml.Node) -> None:
        """Raise `DialectError` for a document that is too large or too deep, contains itself, or has other types."""
        self._measure(node)

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        if id(node) in self._around:
            raise DialectError(
                problem="an alias inside its own anchor: it would contain itself", problem_mark=_at(node)
            )
        if id(node) in self._known:
            return self._known[id(node)]
        _check_tag(node)
        self._around.add(id(node))
        below = [self._measure(child) for child in _children(node)]
        self._around.remove(id(node))
        nodes, levels = 1 + sum(n for n, _ in below), 1 + max((d for _, d in below), default=0)
        check_depth(levels, _at(node))
        check_count(nodes, _at(node))
        self._known[id(node)] = nodes, levels
        return nodes, levels


def check_count(nodes: int, mark: yaml.Mark | None) -> None:
    """Raise `DialectError` where so many values are too many."""
    if nodes > _MOST_NODES:
        reason = f"expands to more than {_MOST_NODES:,} values once its aliases are written out"
        raise DialectError(problem=reason, problem_mark=mark)


def check_depth(levels: int, mark: yaml.Mark | None) -> None:
    """Raise `DialectError` where so many sections and lists inside each other are too many."""
    if levels > _DEEPEST:
        raise DialectError(problem=f"it is nested too deeply: more than {_DEEPEST} levels", problem_mark=mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_tag(node: yaml.Node) -> None:
    if node.tag not in _TAGS[type(node)]:
        tag = node.tag.replace(_CORE, "!!")
        tag = tag if len(tag) <= 60 else f"{tag[:57]}..."
        raise DialectError(
            problem=f"the tag {tag} is not allowed here; write the value without it", problem_mark=_at(node)
        )


def _at(node: yaml.Node) -> yaml.Mark | None:
    return node.start_mark

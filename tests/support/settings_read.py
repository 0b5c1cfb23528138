"""Which settings the package's code reads, found with mypy's own types rather than by name.

A read is an attribute access whose object mypy knows to be a section of the configuration, in code outside of
`penstock/config/`: a rule that only compares settings with each other does not honour them. A method of a section
passes its own reads on to whoever uses it from outside. An attribute that a `case` pattern takes out is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mypy.build import BuildResult, build
from mypy.modulefinder import BuildSource
from mypy.nodes import AssignmentStmt, ClassDef, Decorator, FuncDef, NameExpr, Node, TypeInfo
from mypy.options import Options
from mypy.traverser import NameAndMemberCollector
from mypy.types import Instance, LiteralType, Type, TypeVarType, UnionType, get_proper_type

_CONFIG = "penstock.config"
_SECTION = f"{_CONFIG}.sections.base.Section"

Attribute = tuple[str, str]
"""A class's full name, and the name of a field or method; an empty name is the class itself."""


@dataclass(frozen=True)
class SettingsRead:
    """Fields of sections, as `Section.field`."""

    all: frozenset[str]
    unread: frozenset[str]


@dataclass
class _Section:
    """A section's own fields, and what its own methods read."""

    bases: list[str]
    fields: list[str] = field(default_factory=list)
    discriminators: list[str] = field(default_factory=list)
    """Fields with one possible value, which choose the section: who asks for the class has read them."""
    methods: dict[str, set[Attribute]] = field(default_factory=dict)


def settings_read(package: Path) -> SettingsRead:
    """Look through the package in this folder, which need not be the one that is imported."""
    result = _build(package)
    sections: dict[str, _Section] = {}
    reads: set[Attribute] = set()
    for name, tree in result.files.items():
        if name.startswith(f"{_CONFIG}."):
            found = (_section(node, result) for node in tree.defs if isinstance(node, ClassDef))
            sections |= {full_name: section for full_name, section in found if _SECTION in section.bases}
        elif name.partition(".")[0] == "penstock" and name != _CONFIG:
            reads |= _reads(tree, result)
    honoured = _followed(reads, sections)
    fields = {(owner, name) for owner, section in sections.items() for name in section.fields}
    chosen = {(owner, name) for owner, section in sections.items() for name in section.discriminators}
    unread = fields - honoured - {(owner, name) for owner, name in chosen if (owner, "") in reads}
    return SettingsRead(frozenset(map(_shown, fields)), frozenset(map(_shown, unread)))


def _shown(attribute: Attribute) -> str:
    return f"{attribute[0].rpartition('.')[2]}.{attribute[1]}"


def _build(package: Path) -> BuildResult:
    """Types of every expression of the package; imports from elsewhere are of no interest and not followed."""
    options = Options()
    options.python_version = sys.version_info[:2]
    options.export_types = options.preserve_asts = options.check_untyped_defs = options.ignore_missing_imports = True
    options.incremental = False
    options.follow_imports = "skip"
    options.ignore_errors = True
    sources = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        sources.append(BuildSource(str(path), ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return build(sources, options)


def _section(node: ClassDef, result: BuildResult) -> tuple[str, _Section]:
    section = _Section([base.fullname for base in node.info.mro[1:]])
    for statement in node.defs.body:
        if isinstance(statement, AssignmentStmt) and statement.unanalyzed_type is not None:
            [name] = [target.name for target in statement.lvalues if isinstance(target, NameExpr)]
            section.fields.append(name)
            if isinstance(get_proper_type(statement.type), LiteralType):
                section.discriminators.append(name)
        elif isinstance(statement, FuncDef | Decorator):
            section.methods[statement.name] = _reads(statement, result)
    return node.fullname, section


def _followed(reads: set[Attribute], sections: dict[str, _Section]) -> set[Attribute]:
    """Reads as (section that declares the field, field), with those of the methods that are used."""
    followed: set[Attribute] = set()
    todo = list(reads)
    while todo:
        owner, name = todo.pop()
        for full_name, section in sections.items():
            if owner != full_name and owner not in section.bases:
                continue
            declared = next((place for place in (full_name, *section.bases) if _has(sections.get(place), name)), None)
            if declared is not None and (declared, name) not in followed:
                followed.add((declared, name))
                todo += sections[declared].methods.get(name, ())
    return followed


def _has(section: _Section | None, name: str) -> bool:
    return section is not None and (name in section.fields or name in section.methods)


def _reads(node: Node, result: BuildResult) -> set[Attribute]:
    """Attributes by the class of their object, and the classes that are asked for (as in `isinstance` and `case`)."""
    collector = NameAndMemberCollector()
    node.accept(collector)
    members = collector.member_exprs
    asked = {
        (place.node.fullname, "") for place in (*collector.name_exprs, *members) if isinstance(place.node, TypeInfo)
    }
    return asked | {(info.fullname, read.name) for read in members for info in _classes(result.types.get(read.expr))}


def _classes(kind: Type | None) -> Iterator[TypeInfo]:
    """The classes an object of this type may have."""
    proper = get_proper_type(kind)
    if isinstance(proper, UnionType):
        for item in proper.items:
            yield from _classes(item)
    elif isinstance(proper, TypeVarType):
        yield from _classes(proper.upper_bound)
    elif isinstance(proper, Instance):
        yield proper.type

"""What the models hold at a dotted key: sections, choices between kinds of section, and single values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from penstock.config.sections.base import Section


@dataclass(frozen=True)
class KeySpec:
    """What may stand at a key: one section, one of several (told apart by the setting `tag`), or a value."""

    annotation: Any
    sections: tuple[type[Section], ...] = ()

    @classmethod
    def of(cls, annotation: Any) -> KeySpec:
        """What a field with this annotation allows."""
        return cls(annotation, tuple(t for t in members_of(annotation) if _is_section(t)))

    @property
    def is_choice(self) -> bool:
        """Whether the setting `tag` decides which section it is."""
        return len(self.sections) > 1

    @property
    def tag(self) -> str:
        """The setting that names which section of a choice is meant: `kind`, or `policy` of `staleness`."""
        return tag_of(self.sections[0])

    @property
    def is_mapping(self) -> bool:
        """Whether keys may follow that no model lists, as in `rollout.environment.args`."""
        return any(get_origin(t) is dict for t in members_of(self.annotation))

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return any(get_origin(t) in (list, tuple) for t in members_of(self.annotation))

    @property
    def element(self) -> KeySpec | None:
        """What stands at each place of a list of sections; None for anything else."""
        for member in members_of(self.annotation):
            if get_origin(member) is list and _is_section(get_args(member)[0]):
                return KeySpec.of(get_args(member)[0])
        return None

    @property
    def takes_text(self) -> bool:
        """Whether the value is text, free or one of some names, and nothing else but null."""
        alternatives = [t for t in members_of(self.annotation) if t is not NoneType]
        return bool(alternatives) and all(
            t is str or (get_origin(t) is Literal and all(isinstance(name, str) for name in get_args(t)))
            for t in alternatives
        )

    def kinds(self) -> dict[str, type[Section]]:
        """The sections of a choice by the name that selects them."""
        return {kind_of(section): section for section in self.sections}

    def below(self, name: str) -> KeySpec | None:
        """What may stand at `name` in here, in the first section that knows it."""
        for section in self.sections:
            if name in section.model_fields:
                return KeySpec.of(section.model_fields[name].annotation)
        return None


@dataclass(frozen=True)
class Location:
    """Where an error is: its dotted key, the section around it and what is expected there.

    `holder` is the section that has (or should have) the key's last part; `alternatives` are the other kinds that could
    have stood in its place, and `tag` is the setting that chooses between them.
    """

    key: str
    prefix: str
    name: str
    spec: KeySpec | None
    holder: type[Section] | None
    alternatives: dict[str, type[Section]]
    tag: str


def locate(root: type[Section], loc: Sequence[str | int]) -> Location:
    """Follow pydantic's error location through the models, leaving out the union tags it puts in."""
    names: list[str] = []
    spec: KeySpec | None = KeySpec((), (root,))
    holder: type[Section] | None = None
    alternatives: dict[str, type[Section]] = {}
    tag = ""
    for part in loc:
        if spec is not None and spec.is_choice:
            alternatives = spec.kinds()
            tag = spec.tag
            chosen = alternatives[str(part)]
            spec = KeySpec(chosen, (chosen,))
            continue
        if part == "[key]":
            continue
        if spec is not None and spec.sections:
            holder = spec.sections[0]
            if holder not in alternatives.values():
                alternatives = {}
            spec = spec.below(str(part))
        elif spec is not None and isinstance(part, int) and spec.element is not None:
            holder, spec = None, spec.element
        else:
            holder, spec = None, None
        names.append(str(part))
    return Location(
        key=dotted(names),
        prefix=dotted(names[:-1]),
        name=names[-1] if names else "",
        spec=spec,
        holder=holder,
        alternatives=alternatives,
        tag=tag,
    )


def dotted(names: Sequence[str]) -> str:
    """`a.b[0].c` for the parts a, b, 0, c."""
    key = ""
    for name in names:
        key += f"[{name}]" if key and name.isdigit() else f".{name}" if key else name
    return key


def join(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` at the top."""
    return f"{prefix}.{name}" if prefix else name


def tag_of(section: type[Section]) -> str:
    """The setting whose only value selects this section of a choice; it is the section's first."""
    return next(iter(section.model_fields))


def kind_of(section: type[Section]) -> str:
    """The name that selects a section of a choice."""
    return str(get_args(section.model_fields[tag_of(section)].annotation)[0])


def all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a section, sections included, of all kinds of a choice."""
    for name, field in section.model_fields.items():
        key = join(prefix, name)
        yield key
        for child in KeySpec.of(field.annotation).sections:
            yield from all_keys(child, key)


def required_keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    """The settings below a section that have no default, with their descriptions."""
    for name, field in section.model_fields.items():
        if not field.is_required():
            continue
        children = KeySpec.of(field.annotation).sections
        if len(children) == 1:
            yield from required_keys(children[0], join(prefix, name))
        else:
            yield join(prefix, name), field.description or ""


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The types that a union allows; of anything else, itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)

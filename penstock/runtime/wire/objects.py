"""Instances of classes that may cross: how they are written, and how they are made again.

What can be known of a class is worked out once, when the first of its instances is met.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from penstock.errors import WireError
from penstock.runtime.wire import tags
from penstock.runtime.wire.crossing import class_of_package, field_names, full_name, is_marked

if TYPE_CHECKING:
    from penstock.runtime.wire.encoder import Encoder

Writer = Callable[["Encoder", Any], None]
Make = Callable[[list[Any]], Any]
NO_OBJECT = -1
"""The number of fields of a class without any: no message can give as many."""


@dataclass(frozen=True, slots=True)
class ReadClass:
    """A class that a message has named, and how its instances are read."""

    kind: Any
    count: int
    """Fields of an instance; `NO_OBJECT` for enums and settings."""
    make: Make
    """An instance, from that many values; what its `__post_init__` checks is checked."""
    members: dict[str, Enum] | None = None
    """Of an enum."""
    is_settings: bool = False


def writer_of(kind: type) -> Writer | None:
    """How instances of a marked class or of settings are written; None for all others."""
    if is_marked(kind):
        return _member(kind) if issubclass(kind, Enum) else _object(kind)
    settings = sys.modules.get("penstock.config.sections.base")
    if settings is not None and issubclass(kind, settings.Section):
        return _settings(kind)
    return None


def read_class(name: bytes) -> ReadClass:
    """The class of a name, which must be one that may cross. Raises `WireError`."""
    return _known.get(name) or _found(name)


_known: dict[bytes, ReadClass] = {}
"""Classes that messages have named so far."""


def _found(name: bytes) -> ReadClass:
    text = str(name, "utf-8")
    kind: Any = class_of_package(text)
    if is_marked(kind):
        if issubclass(kind, Enum):
            found = ReadClass(kind, NO_OBJECT, _none_is_made, members=dict(kind.__members__))
        else:
            found = ReadClass(kind, len(field_names(kind)), _maker(kind))
    elif _is_settings(kind):
        found = ReadClass(kind, NO_OBJECT, _none_is_made, is_settings=True)
    else:
        raise WireError(f"{text} is not marked as something that crosses between processes")
    _known[name] = found
    return found


def _is_settings(kind: type) -> bool:
    from penstock.config.sections.base import Section

    return issubclass(kind, Section)


def _none_is_made(values: list[Any]) -> Any:
    raise WireError("an instance of a class that is none of objects")


def _maker(kind: type) -> Make:
    if not is_dataclass(kind):
        return lambda values: kind(*values)
    given, names = fields(kind), field_names(kind)
    if not hasattr(kind, "__post_init__") and not hasattr(kind, "__slots__"):
        return _plain_maker(kind, names)
    if all(field.init and not field.kw_only for field in given):
        return lambda values: kind(*values)

    def make(values: list[Any]) -> Any:
        known = dict(zip(names, values, strict=True))
        made = kind(**{field.name: known[field.name] for field in given if field.init})
        for field in given:
            if not field.init:
                object.__setattr__(made, field.name, known[field.name])
        return made

    return make


def _plain_maker(kind: type, names: tuple[str, ...]) -> Make:
    """Of a class whose `__init__` only sets its fields, which a frozen class does one slow call at a time."""
    new = object.__new__

    def make(values: list[Any]) -> Any:
        made: Any = new(kind)
        made.__dict__.update(zip(names, values))  # noqa: B905 - they are as many as the class has, which is checked
        return made

    return make


def _object(kind: type) -> Writer:
    names, name = field_names(kind), name_of(kind)
    count = len(names)
    values: Callable[[Any], Iterable[Any]] = attrgetter(*names) if count > 1 else _few(names)

    def write(encoder: Encoder, value: Any) -> None:
        out = encoder.out
        out += encoder.classes.get(kind) or encoder.class_named(tags.OBJECT, kind, name)
        out.append(count)
        try:
            encoder.write_all(values(value))
        except WireError as error:
            raise WireError(f"{kind.__name__}: {error}") from error.__cause__

    return write


def _few(names: tuple[str, ...]) -> Callable[[Any], Iterable[Any]]:
    return lambda value: tuple(getattr(value, name) for name in names)


def _member(kind: type) -> Writer:
    name = name_of(kind)

    def write(encoder: Encoder, value: Any) -> None:
        encoder.out += encoder.classes.get(kind) or encoder.class_named(tags.MEMBER, kind, name)
        encoder.write_text(value._name_)  # `name` is a property, and slower

    return write


def _settings(kind: Any) -> Writer:
    names, name = tuple(kind.model_fields), name_of(kind)

    def write(encoder: Encoder, value: Any) -> None:
        encoder.out += encoder.classes.get(kind) or encoder.class_named(tags.SETTINGS, kind, name)
        encoder.write_all(({name: getattr(value, name) for name in names}, frozenset(value.model_fields_set)))

    return write


def name_of(kind: type) -> bytes:
    """A class's name, as it follows the index that a message gives it."""
    name = full_name(kind).encode()
    if len(name) > 255:
        raise WireError(f"{kind.__name__} cannot cross: the name of its module and its own are too long together")
    return bytes([len(name)]) + name

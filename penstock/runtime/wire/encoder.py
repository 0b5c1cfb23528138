"""Values as bytes."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from penstock.error_form import ErrorLink, told
from penstock.errors import FailureKind, UserTrace, WireError
from penstock.runtime.wire import tags
from penstock.runtime.wire.crossing import crosses, field_names, full_name, is_marked
from penstock.text import repr_text

for _kind in (FailureKind, UserTrace, ErrorLink):
    crosses(_kind)  # they are declared below this package

Buffer = bytes | memoryview
_PACK_COUNT, _PACK_INT, _PACK_FLOAT = tags.TAG_AND_COUNT.pack, tags.TAG_AND_INT.pack, tags.TAG_AND_FLOAT.pack
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Encoded:
    """A value as bytes: the head says what it is, the buffers hold arrays, which are not copied."""

    head: bytes
    buffers: tuple[Buffer, ...] = ()
    """Each with its padding as a buffer of its own, if it needs any."""

    @property
    def body_size(self) -> int:
        """Bytes of all buffers."""
        return sum(map(len, self.buffers))


def encode(value: Any) -> Encoded:
    """A value as bytes. Arrays are read when the result is sent; leave them unchanged until then.

    Raises `WireError`, which names the class, if something in it cannot cross.
    """
    encoder = Encoder()
    encoder.write(value)
    return Encoded(bytes(encoder.out), tuple(encoder.buffers))


class Encoder:
    """Writes values one after the other; after an error it is of no further use."""

    __slots__ = ("_classes", "_depth", "buffers", "out")

    def __init__(self) -> None:
        self.out = bytearray()
        self.buffers: list[Buffer] = []
        self._classes: dict[type, int] = {}
        self._depth = 0

    def write(self, value: Any) -> None:
        """One value."""
        kind = type(value)
        (_WRITERS.get(kind) or _writer_of(kind))(self, value)

    def write_all(self, values: Iterable[Any]) -> None:
        """Values, one after the other, inside the one that was begun last."""
        self._depth += 1
        if self._depth > tags.DEEPEST:
            raise WireError(f"a value is nested more than {tags.DEEPEST} deep, or contains itself, and cannot cross")
        out, writers = self.out, _WRITERS
        for value in values:
            kind = type(value)
            if kind is str:  # these here and not by their writers: most values are of these kinds
                content = value.encode("utf-8", "surrogatepass")
                out += _PACK_COUNT(tags.TEXT, len(content))
                out += content
            elif kind is int and _LEAST <= value <= _MOST:
                out += _PACK_INT(tags.INT, value)
            elif kind is float:
                out += _PACK_FLOAT(tags.FLOAT, value)
            else:
                (writers.get(kind) or _writer_of(kind))(self, value)
        self._depth -= 1

    def write_class(self, tag: int, kind: type) -> None:
        """A tag and a class."""
        known = self._classes.get(kind)
        if known is not None:
            self.out += tags.TAG_AND_INDEX.pack(tag, known)
            return
        number = self._classes[kind] = len(self._classes)
        if number >= tags.MOST_CLASSES:
            raise WireError(f"a message has values of more than {tags.MOST_CLASSES} classes")
        self.out += tags.TAG_AND_INDEX.pack(tag, number)
        self.out += _name(kind)

    def write_buffer(self, content: Buffer) -> None:
        """Bytes for the body."""
        if len(content):
            self.buffers.append(content)
            if missing := tags.padding(len(content)):
                self.buffers.append(bytes(missing))


Writer = Callable[[Encoder, Any], None]


@cache
def _name(kind: type) -> bytes:
    name = full_name(kind).encode()
    return tags.TAG_AND_COUNT.pack(tags.TEXT, len(name)) + name


def _constant(tag: int) -> Writer:
    return lambda encoder, _: encoder.out.append(tag)


def _int(encoder: Encoder, value: int) -> None:
    if _LEAST <= value <= _MOST:
        encoder.out += _PACK_INT(tags.INT, value)
    else:
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        _sized(encoder, tags.LONG, content)


def _float(encoder: Encoder, value: float) -> None:
    encoder.out += tags.TAG_AND_FLOAT.pack(tags.FLOAT, value)


def _sized(encoder: Encoder, tag: int, content: bytes) -> None:
    if len(content) >= 1 << 32:
        raise WireError(f"a value of {len(content):,} bytes cannot cross")
    encoder.out += tags.TAG_AND_COUNT.pack(tag, len(content))
    encoder.out += content


def _text(encoder: Encoder, value: str) -> None:
    _sized(encoder, tags.TEXT, value.encode("utf-8", "surrogatepass"))


def _bytes(encoder: Encoder, value: bytes) -> None:
    if len(value) <= tags.LONGEST_INLINE:
        _sized(encoder, tags.BYTES, bytes(value))
    else:
        encoder.out += tags.TAG_AND_SIZE.pack(tags.BUFFER, len(value))
        encoder.write_buffer(bytes(value))


def _path(encoder: Encoder, value: PurePath) -> None:
    _sized(encoder, tags.PATH, str(value).encode("utf-8", "surrogatepass"))


def _sequence(tag: int) -> Writer:
    def write(encoder: Encoder, value: list[Any] | tuple[Any, ...]) -> None:
        if len(value) >= tags.SHORTEST_PACKED and (packed := _packed(value)) is not None:
            kind, content = packed
            encoder.out.append(kind)
            encoder.out += tags.TAG_AND_COUNT.pack(tag, len(value))
            encoder.out += content
        else:
            encoder.out += tags.TAG_AND_COUNT.pack(tag, len(value))
            encoder.write_all(value)

    return write


def _packed(value: list[Any] | tuple[Any, ...]) -> tuple[int, bytes] | None:
    """Numbers of one kind as plain bytes; None if they are not."""
    kind = type(value[0])
    if kind not in (int, float) or set(map(type, value)) != {kind}:
        return None
    try:
        tag, code = (tags.INTS, "q") if kind is int else (tags.FLOATS, "d")
        return tag, struct.pack(f"<{len(value)}{code}", *value)
    except struct.error:  # a whole number of more than 8 bytes
        return None


def _set(tag: int) -> Writer:
    def write(encoder: Encoder, value: frozenset[Any]) -> None:
        encoder.out += tags.TAG_AND_COUNT.pack(tag, len(value))
        encoder.write_all(value)

    return write


def _mapping(tag: int) -> Writer:
    def write(encoder: Encoder, value: Mapping[Any, Any]) -> None:
        encoder.out += tags.TAG_AND_COUNT.pack(tag, len(value))
        encoder.write_all(part for item in value.items() for part in item)

    return write


def _error(encoder: Encoder, value: BaseException) -> None:
    encoder.out.append(tags.ERROR)
    encoder.write_all((tuple(map(_only_what_crosses, told(value))),))


def _only_what_crosses(link: ErrorLink) -> ErrorLink:
    """A link without fields that cannot cross: an error must arrive, whatever somebody has attached to it."""
    fields = {name: value for name, value in (link.fields or {}).items() if can_cross(value)}
    arguments = tuple(value if can_cross(value) else repr_text(value) for value in link.arguments)
    return replace(link, fields=fields, arguments=arguments)


def can_cross(value: Any) -> bool:
    """Whether a value can be encoded."""
    try:
        encode(value)
    except WireError:
        return False
    return True


_WRITERS: dict[type, Writer] = {
    type(None): _constant(tags.NONE),
    bool: lambda encoder, value: encoder.out.append(tags.TRUE if value else tags.FALSE),
    int: _int,
    float: _float,
    str: _text,
    bytes: _bytes,
    bytearray: _bytes,
    list: _sequence(tags.LIST),
    tuple: _sequence(tags.TUPLE),
    set: _set(tags.SET),
    frozenset: _set(tags.FROZENSET),
    dict: _mapping(tags.DICT),
    MappingProxyType: _mapping(tags.READ_ONLY),
}
"""How values of exactly these classes are written; marked classes are added when they are first met."""

_LIKE: tuple[tuple[type, Writer], ...] = (
    (PurePath, _path),
    (BaseException, _error),
    (str, lambda encoder, value: _text(encoder, str.__str__(value))),
    (int, lambda encoder, value: _int(encoder, int(value))),
    (float, lambda encoder, value: _float(encoder, float(value))),
    (dict, _mapping(tags.DICT)),
    (list, lambda encoder, value: encoder.write(list(value))),
)
"""Instances of subclasses of these cross as the plain value: what a library calls its own kind of text is text."""


def _writer_of(kind: type) -> Writer:
    """How a class's values are written, if they can cross; found once per class."""
    writer = _foreign_writer(kind) or _own_writer(kind)
    if writer is None:
        writer = next((writer for base, writer in _LIKE if issubclass(kind, base)), None)
    if writer is None or (issubclass(kind, Enum) and not is_marked(kind)):
        raise WireError(f"a value of {full_name(kind)} cannot cross between processes: it is neither plain nor marked")
    if not issubclass(kind, BaseException):  # of those, there may be a new class for every error
        _WRITERS[kind] = writer
    return writer


def _own_writer(kind: type) -> Writer | None:
    if is_marked(kind):
        return _member if issubclass(kind, Enum) else _object(kind)
    settings = sys.modules.get("penstock.config.sections.base")
    if settings is not None and issubclass(kind, settings.Section):
        return _settings(kind)
    return None


def _foreign_writer(kind: type) -> Writer | None:
    """Of arrays and tensors; whoever sends none does without numpy and torch."""
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if not roots & {"numpy", "torch"}:
        return None
    from penstock.runtime.wire import arrays

    return arrays.writer_of(kind)


def _member(encoder: Encoder, value: Enum) -> None:
    encoder.write_class(tags.MEMBER, type(value))
    _text(encoder, value.name)


def _object(kind: type) -> Writer:
    names = field_names(kind)
    values: Callable[[Any], Iterable[Any]] = attrgetter(*names) if len(names) > 1 else _few(names)

    def write(encoder: Encoder, value: Any) -> None:
        encoder.write_class(tags.OBJECT, kind)
        encoder.out.append(len(names))
        try:
            encoder.write_all(values(value))
        except WireError as error:
            raise WireError(f"{kind.__name__}: {error}") from error.__cause__

    return write


def _few(names: tuple[str, ...]) -> Callable[[Any], Iterable[Any]]:
    return lambda value: tuple(getattr(value, name) for name in names)


def _settings(kind: Any) -> Writer:
    names = tuple(kind.model_fields)

    def write(encoder: Encoder, value: Any) -> None:
        encoder.write_class(tags.SETTINGS, kind)
        encoder.write_all(({name: getattr(value, name) for name in names}, frozenset(value.model_fields_set)))

    return write

"""Values as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.error_form import ErrorLink, told
from penstock.errors import FailureKind, UserTrace, WireError
from penstock.runtime.wire import objects, tags
from penstock.runtime.wire.crossing import crosses, full_name, is_marked
from penstock.runtime.wire.objects import Writer
from penstock.text import repr_text

for _kind in (FailureKind, UserTrace, ErrorLink):
    crosses(_kind)  # they are declared below this package

Buffer = bytes | memoryview
_PACK_INT, _PACK_FLOAT = tags.TAG_AND_INT.pack, tags.TAG_AND_FLOAT.pack
_INT, _FLOAT, _NONE = tags.INT, tags.FLOAT, tags.NONE
_SMALL_INTS = tuple(bytes([tags.SMALL_INT, value]) for value in range(256))
_SHORT_TEXTS = tuple(bytes([tags.SHORT_TEXT, size]) for size in range(256))
"""How texts of up to 255 bytes begin."""
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class Encoded(NamedTuple):
    """A value as bytes: the head says what it is, the buffers hold arrays, which are not copied."""

    head: bytes
    buffers: tuple[Buffer, ...] = ()
    """Each with its padding as a buffer of its own, if it needs any."""


def encode(value: Any) -> Encoded:
    """A value as bytes. Arrays are read when the result is sent; leave them unchanged until then.

    Raises `WireError`, which names the class, if something in it cannot cross.
    """
    encoder = Encoder()
    encoder.write(value)
    return Encoded(bytes(encoder.out), tuple(encoder.buffers))


class Encoder:
    """Writes values one after the other; after an error it is of no further use."""

    __slots__ = ("_depth", "buffers", "classes", "out")

    def __init__(self) -> None:
        self.out = bytearray()
        self.buffers: list[Buffer] = []
        self.classes: dict[type, bytes] = {}
        """How a value of each class begins that this message has named."""
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
            if kind is int:  # these here and not by their writers: most values are of these kinds
                if 0 <= value <= 255:
                    out += _SMALL_INTS[value]
                elif _LEAST <= value <= _MOST:
                    out += _PACK_INT(_INT, value)
                else:
                    _long(self, value)
            elif kind is float:
                out += _PACK_FLOAT(_FLOAT, value)
            elif value is None:
                out.append(_NONE)
            elif kind is str:
                self.write_text(value)
            else:
                (writers.get(kind) or _writer_of(kind))(self, value)
        self._depth -= 1

    def write_text(self, value: str) -> None:
        """Text."""
        content = value.encode("utf-8", "surrogatepass")
        size = len(content)
        if size <= 255:
            self.out += _SHORT_TEXTS[size]
            self.out += content
        else:
            _sized(self, tags.TEXT, content)

    def class_named(self, tag: int, kind: type, name: bytes) -> bytes:
        """The first bytes of a value of a class that this message has not named yet."""
        number = len(self.classes)
        if number >= tags.MOST_CLASSES:
            raise WireError(f"a message has values of more than {tags.MOST_CLASSES} classes")
        self.classes[kind] = begin = tags.TAG_AND_INDEX.pack(tag, number)
        return begin + name

    def write_buffer(self, content: Buffer) -> None:
        """Bytes for the body."""
        if len(content):
            self.buffers.append(content)
            if missing := tags.padding(len(content)):
                self.buffers.append(bytes(missing))


def _one(encoder: Encoder, value: Any) -> None:
    """A value that `write_all` writes itself."""
    encoder.write_all((value,))


def _long(encoder: Encoder, value: int) -> None:
    """A whole number of more than 8 bytes."""
    _sized(encoder, tags.LONG, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _sized(encoder: Encoder, tag: int, content: bytes) -> None:
    if len(content) >= 1 << 32:
        raise WireError(f"a value of {len(content):,} bytes cannot cross")
    encoder.out += tags.TAG_AND_COUNT.pack(tag, len(content))
    encoder.out += content


def _bytes(encoder: Encoder, value: bytes) -> None:
    if len(value) <= tags.LONGEST_INLINE:
        _sized(encoder, tags.BYTES, bytes(value))
    else:
        encoder.out += tags.TAG_AND_SIZE.pack(tags.BUFFER, len(value))
        encoder.write_buffer(bytes(value))


def _path(encoder: Encoder, value: PurePath) -> None:
    _sized(encoder, tags.PATH, str(value).encode("utf-8", "surrogatepass"))


def _sequence(tag: int) -> Writer:
    empty = bytes([tags.NO_TUPLE]) if tag == tags.TUPLE else tags.TAG_AND_COUNT.pack(tag, 0)

    def write(encoder: Encoder, value: list[Any] | tuple[Any, ...]) -> None:
        count = len(value)
        if not count:
            encoder.out += empty
        elif count >= tags.SHORTEST_PACKED and (packed := _packed(value, count)) is not None:
            kind, content = packed
            encoder.out += tags.PACKED.pack(kind, tag, count)
            encoder.out += content
        else:
            encoder.out += tags.TAG_AND_COUNT.pack(tag, count)
            encoder.write_all(value)

    return write


def _packed(value: list[Any] | tuple[Any, ...], count: int) -> tuple[int, bytes] | None:
    """Numbers of one kind as plain bytes; None if they are not."""
    kind = type(value[0])
    if (kind is not int and kind is not float) or list(map(type, value)).count(kind) != count:
        return None
    try:
        tag, code = (tags.INTS, "q") if kind is int else (tags.FLOATS, "d")
        return tag, struct.pack(f"<{count}{code}", *value)
    except struct.error:  # a whole number of more than 8 bytes
        return None


def _set(tag: int) -> Writer:
    empty = bytes([tags.NO_FROZENSET]) if tag == tags.FROZENSET else tags.TAG_AND_COUNT.pack(tag, 0)

    def write(encoder: Encoder, value: frozenset[Any]) -> None:
        if not value:
            encoder.out += empty
        else:
            encoder.out += tags.TAG_AND_COUNT.pack(tag, len(value))
            encoder.write_all(value)

    return write


def _mapping(tag: int) -> Writer:
    def write(encoder: Encoder, value: Mapping[Any, Any]) -> None:
        encoder.out += tags.TAG_AND_COUNT.pack(tag, len(value))
        if value:
            encoder.write_all([part for item in value.items() for part in item])

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
    type(None): _one,
    bool: lambda encoder, value: encoder.out.append(tags.TRUE if value else tags.FALSE),
    int: _one,
    float: _one,
    str: Encoder.write_text,
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
    (str, lambda encoder, value: encoder.write_text(str.__str__(value))),
    (int, lambda encoder, value: encoder.write(int(value))),
    (float, lambda encoder, value: encoder.write(float(value))),
    (dict, _mapping(tags.DICT)),
    (list, lambda encoder, value: encoder.write(list(value))),
)
"""Instances of subclasses of these cross as the plain value: what a library calls its own kind of text is text."""


def _writer_of(kind: type) -> Writer:
    """How a class's values are written, if they can cross; found once per class."""
    writer = _foreign_writer(kind) or objects.writer_of(kind)
    if writer is None:
        writer = next((writer for base, writer in _LIKE if issubclass(kind, base)), None)
    if writer is None or (issubclass(kind, Enum) and not is_marked(kind)):
        raise WireError(f"a value of {full_name(kind)} cannot cross between processes: it is neither plain nor marked")
    if not issubclass(kind, BaseException):  # of those, there may be a new class for every error
        _WRITERS[kind] = writer
    return writer


def _foreign_writer(kind: type) -> Writer | None:
    """Of arrays and tensors; whoever sends none does without numpy and torch."""
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if not roots & {"numpy", "torch"}:
        return None
    from penstock.runtime.wire import arrays

    return arrays.writer_of(kind)

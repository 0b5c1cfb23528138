"""Bytes as values again; nothing that they say is believed before it is checked."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.error_form import ErrorLink, rebuilt
from penstock.errors import WireError
from penstock.runtime.wire import encoder as _marks_what_lies_below  # noqa: F401
from penstock.runtime.wire import tags
from penstock.runtime.wire.crossing import class_of_package, field_names, is_marked

_UNPACK_INT, _UNPACK_FLOAT = tags.INT64.unpack_from, tags.FLOAT64.unpack_from
_UNPACK_COUNT, _UNPACK_INDEX = tags.COUNT.unpack_from, tags.INDEX.unpack_from
_CONSTANTS = {tags.NONE: None, tags.TRUE: True, tags.FALSE: False}


def decode(head: bytes | bytearray, body: bytes | bytearray = b"") -> Any:
    """The value that was encoded. Arrays in it are views of `body`.

    Raises `WireError` if the bytes are not what `encode` writes. Nothing is allocated on the word of a count or length:
    the bytes it speaks of must be there.
    """
    decoder = Decoder(head, body)
    try:
        value = decoder.read()
        decoder.finish()
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"a message cannot be decoded ({type(error).__name__})") from error
    return value


class Decoder:
    """Reads values one after the other; after an error it is of no further use."""

    __slots__ = ("_at", "_body", "_body_at", "_classes", "_depth", "_head")

    def __init__(self, head: bytes | bytearray, body: bytes | bytearray) -> None:
        self._head, self._body = head, memoryview(body)
        self._at = self._body_at = 0
        self._classes: list[type] = []
        self._depth = 0

    def read(self) -> Any:
        """The next value."""
        tag = self._head[self._at]
        self._at += 1
        return _READERS[tag](self)

    def read_all(self, count: int) -> list[Any]:
        """That many values, inside the one that was begun last."""
        if count > len(self._head) - self._at:
            raise WireError(f"a message of {len(self._head)} bytes speaks of {count} values")
        self._depth += 1
        if self._depth > tags.DEEPEST:
            raise WireError(f"a message is nested more than {tags.DEEPEST} deep")
        head, at, values = self._head, self._at, list[Any]()
        for _ in range(count):
            tag = head[at]
            at += 1
            if tag == tags.INT:  # these here and not by their readers: most values are of these kinds
                values += _UNPACK_INT(head, at)
                at += 8
            elif tag == tags.TEXT:
                end = at + 4 + _UNPACK_COUNT(head, at)[0]
                if end > len(head):
                    raise WireError("a message ends in the middle of a text")
                values.append(str(head[at + 4 : end], "utf-8", "surrogatepass"))
                at = end
            elif tag == tags.FLOAT:
                values += _UNPACK_FLOAT(head, at)
                at += 8
            elif tag <= tags.FALSE:
                values.append(_CONSTANTS[tag])
            else:
                self._at = at
                values.append(_READERS[tag](self))
                at = self._at
        self._at = at
        self._depth -= 1
        return values

    def take(self, size: int) -> bytes | bytearray:
        """The next bytes."""
        end = self._at + size
        content = self._head[self._at : end]
        if len(content) < size:
            raise WireError(f"a message ends in the middle of a value of {size} bytes")
        self._at = end
        return content

    def text(self) -> str:
        """The next value, which must be text."""
        if self.byte() != tags.TEXT:
            raise WireError("a name in a message is no text")
        return str(self.take(self.count()), "utf-8", "surrogatepass")

    def count(self) -> int:
        """The next count."""
        number: int = _UNPACK_COUNT(self._head, self._at)[0]
        self._at += 4
        return number

    def byte(self) -> int:
        """The next byte."""
        self._at += 1
        return self._head[self._at - 1]

    def size(self) -> int:
        """The next length of a buffer."""
        number: int = tags.SIZE.unpack_from(self._head, self._at)[0]
        self._at += 8
        return number

    def buffer(self, size: int) -> memoryview:
        """The next bytes of the body."""
        begin, end = self._body_at, self._body_at + size
        if end > len(self._body):
            raise WireError(f"a body of {len(self._body)} bytes ends in the middle of a buffer of {size} bytes")
        self._body_at = end + tags.padding(size)
        return self._body[begin:end]

    def class_at(self) -> type:
        """The next class."""
        at = self._at
        number: int = _UNPACK_INDEX(self._head, at)[0]
        self._at = at + 2
        if number == len(self._classes) < tags.MOST_CLASSES:
            if self.byte() != tags.TEXT:
                raise WireError("a class in a message is not named by text")
            name = bytes(self.take(self.count()))
            self._classes.append(_known.get(name) or _found(name))
        return self._classes[number]

    def finish(self) -> None:
        """Everything must have been read."""
        if self._at != len(self._head) or self._body_at != len(self._body):
            raise WireError("a message is longer than the value in it")


Reader = Callable[[Decoder], Any]
_known: dict[bytes, type] = {}
"""Classes that messages have named so far."""


def _found(name: bytes) -> type:
    """A class that may cross: a marked one, or one of settings."""
    text = str(name, "utf-8")
    kind = class_of_package(text)
    if not is_marked(kind) and not _is_settings(kind):
        raise WireError(f"{text} is not marked as something that crosses between processes")
    _known[name] = kind
    return kind


def _is_settings(kind: type) -> bool:
    from penstock.config.sections.base import Section

    return issubclass(kind, Section)


def _int(decoder: Decoder) -> int:
    number: int = tags.INT64.unpack_from(decoder._head, decoder._at)[0]
    decoder._at += 8
    return number


def _float(decoder: Decoder) -> float:
    number: float = tags.FLOAT64.unpack_from(decoder._head, decoder._at)[0]
    decoder._at += 8
    return number


def _text(decoder: Decoder) -> str:
    return str(decoder.take(decoder.count()), "utf-8", "surrogatepass")


def _packed(code: str) -> Reader:
    def read(decoder: Decoder) -> Any:
        tag, count = decoder.byte(), decoder.count()
        numbers = struct.unpack(f"<{count}{code}", decoder.take(8 * count))
        if tag == tags.TUPLE:
            return numbers
        if tag == tags.LIST:
            return list(numbers)
        raise WireError("packed numbers are neither a list nor a tuple")

    return read


def _dict(decoder: Decoder) -> dict[Any, Any]:
    parts = decoder.read_all(2 * decoder.count())
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _object(decoder: Decoder) -> Any:
    make, count = _maker(decoder.class_at())
    if decoder.byte() != count:
        raise WireError("an object has another number of fields than its class")
    return make(decoder.read_all(count))


@cache
def _maker(kind: type) -> tuple[Callable[[list[Any]], Any], int]:
    """How a marked class's instance is made from its fields; what `__post_init__` checks is checked."""
    if not is_marked(kind) or issubclass(kind, Enum):
        raise WireError(f"{kind.__name__} is not a class of objects that cross")
    names = field_names(kind)
    if not is_dataclass(kind):
        return (lambda values: kind(*values)), len(names)
    given = fields(kind)
    if not hasattr(kind, "__post_init__") and not hasattr(kind, "__slots__"):
        return _plain_maker(kind, names), len(names)
    if all(field.init and not field.kw_only for field in given):
        return (lambda values: kind(*values)), len(names)

    def make(values: list[Any]) -> Any:
        known = dict(zip(names, values, strict=True))
        made = kind(**{field.name: known[field.name] for field in given if field.init})
        for field in given:
            if not field.init:
                object.__setattr__(made, field.name, known[field.name])
        return made

    return make, len(names)


def _plain_maker(kind: type, names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    """Of a class whose `__init__` only sets its fields, which a frozen class does one slow call at a time."""
    new = object.__new__

    def make(values: list[Any]) -> Any:
        made: Any = new(kind)
        made.__dict__.update(zip(names, values))  # noqa: B905 - they are as many as the class has, which is checked
        return made

    return make


def _member(decoder: Decoder) -> Enum:
    kind = decoder.class_at()
    if not is_marked(kind) or not issubclass(kind, Enum):
        raise WireError(f"{kind.__name__} is not an enum that crosses")
    return kind[decoder.text()]


def _settings(decoder: Decoder) -> Any:
    kind: Any = decoder.class_at()
    values, given = decoder.read_all(2)
    if not _is_settings(kind) or set(values) != set(kind.model_fields) or not set(values).issuperset(given):
        raise WireError(f"a message has settings that {kind.__name__} has not")
    return kind.model_construct(set(given), **values)


def _error(decoder: Decoder) -> Exception:
    (links,) = decoder.read_all(1)
    if not isinstance(links, tuple) or not all(isinstance(link, ErrorLink) for link in links):
        raise WireError("an error has another form than errors have")
    return rebuilt(links)


def _foreign(name: str) -> Reader:
    def read(decoder: Decoder) -> Any:
        from penstock.runtime.wire import arrays

        dtype, shape = decoder.read_all(2)
        return getattr(arrays, name)(dtype, shape, decoder.buffer)

    return read


_READERS: dict[int, Reader] = {
    tags.NONE: lambda _: None,
    tags.TRUE: lambda _: True,
    tags.FALSE: lambda _: False,
    tags.INT: _int,
    tags.LONG: lambda decoder: int.from_bytes(decoder.take(decoder.count()), "little", signed=True),
    tags.FLOAT: _float,
    tags.TEXT: _text,
    tags.BYTES: lambda decoder: bytes(decoder.take(decoder.count())),
    tags.PATH: lambda decoder: Path(_text(decoder)),
    tags.BUFFER: lambda decoder: bytes(decoder.buffer(decoder.size())),
    tags.LIST: lambda decoder: decoder.read_all(decoder.count()),
    tags.TUPLE: lambda decoder: tuple(decoder.read_all(decoder.count())),
    tags.SET: lambda decoder: set(decoder.read_all(decoder.count())),
    tags.FROZENSET: lambda decoder: frozenset(decoder.read_all(decoder.count())),
    tags.DICT: _dict,
    tags.READ_ONLY: lambda decoder: MappingProxyType(_dict(decoder)),
    tags.INTS: _packed("q"),
    tags.FLOATS: _packed("d"),
    tags.OBJECT: _object,
    tags.MEMBER: _member,
    tags.SETTINGS: _settings,
    tags.ERROR: _error,
    tags.ARRAY: _foreign("read_array"),
    tags.TENSOR: _foreign("read_tensor"),
    tags.SCALAR: _foreign("read_scalar"),
}

"""Bytes as values again; nothing that they say is believed before it is checked."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.error_form import ErrorLink, rebuilt
from penstock.errors import WireError
from penstock.runtime.wire import encoder as _marks_what_lies_below  # noqa: F401
from penstock.runtime.wire import tags
from penstock.runtime.wire.objects import ReadClass, read_class

_UNPACK_INT, _UNPACK_FLOAT = tags.INT64.unpack_from, tags.FLOAT64.unpack_from
_UNPACK_COUNT, _UNPACK_TAG_AND_COUNT = tags.COUNT.unpack_from, tags.TAG_AND_COUNT.unpack_from
_INT, _SMALL_INT, _FLOAT, _TEXT, _SHORT_TEXT = tags.INT, tags.SMALL_INT, tags.FLOAT, tags.TEXT, tags.SHORT_TEXT
_CONSTANTS, _LAST_CONSTANT = tags.CONSTANTS, len(tags.CONSTANTS) - 1


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
        self._classes: list[ReadClass] = []
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
        values: list[Any] = []
        head, at = self._head, self._at
        for _ in range(count):
            tag = head[at]
            at += 1
            if tag == _SMALL_INT:  # these here and not by their readers: most values are of these kinds
                values.append(head[at])
                at += 1
            elif tag == _SHORT_TEXT:
                end = at + 1 + head[at]
                if end > len(head):
                    raise WireError("a message ends in the middle of a text")
                values.append(str(head[at + 1 : end], "utf-8", "surrogatepass"))
                at = end
            elif tag == _INT:
                values += _UNPACK_INT(head, at)
                at += 8
            elif tag == _FLOAT:
                values += _UNPACK_FLOAT(head, at)
                at += 8
            elif 0 < tag <= _LAST_CONSTANT:
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
        tag = self.byte()
        if tag != _SHORT_TEXT and tag != _TEXT:
            raise WireError("a name in a message is no text")
        return str(self.take(self.byte() if tag == _SHORT_TEXT else self.count()), "utf-8", "surrogatepass")

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

    def class_at(self) -> ReadClass:
        """The next class."""
        head, at, classes = self._head, self._at, self._classes
        number = head[at] | head[at + 1] << 8
        at += 2
        if number == len(classes) < tags.MOST_CLASSES:
            begin, at = at + 1, at + 1 + head[at]
            classes.append(read_class(bytes(head[begin:at])))
        self._at = at
        return classes[number]

    def finish(self) -> None:
        """Everything must have been read."""
        if self._at != len(self._head) or self._body_at != len(self._body):
            raise WireError("a message is longer than the value in it")


Reader = Callable[[Decoder], Any]


def _constant(value: Any) -> Reader:
    return lambda _: value


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
        head = decoder._head
        tag, count = _UNPACK_TAG_AND_COUNT(head, decoder._at)
        at = decoder._at + 5
        decoder._at = at + 8 * count
        if decoder._at > len(head):
            raise WireError(f"a message ends in the middle of {count} numbers")
        numbers = struct.unpack_from(f"<{count}{code}", head, at)
        if tag == tags.TUPLE:
            return numbers
        if tag == tags.LIST:
            return list(numbers)
        raise WireError("packed numbers are neither a list nor a tuple")

    return read


def _dict(decoder: Decoder) -> dict[Any, Any]:
    count = decoder.count()
    if not count:
        return {}
    parts = decoder.read_all(2 * count)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _object(decoder: Decoder) -> Any:
    read = decoder.class_at()
    count, at = read.count, decoder._at
    if decoder._head[at] != count:
        raise WireError("an object has another number of fields than its class")
    decoder._at = at + 1
    return read.make(decoder.read_all(count))


def _member(decoder: Decoder) -> Enum:
    read = decoder.class_at()
    if read.members is None:
        raise WireError(f"{read.kind.__name__} is not an enum that crosses")
    return read.members[decoder.text()]


def _settings(decoder: Decoder) -> Any:
    read = decoder.class_at()
    kind = read.kind
    values, given = decoder.read_all(2)
    if not read.is_settings or set(values) != set(kind.model_fields) or not set(values).issuperset(given):
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
    **{tag: _constant(value) for tag, value in enumerate(_CONSTANTS) if tag},
    tags.INT: _int,
    tags.SMALL_INT: Decoder.byte,
    tags.LONG: lambda decoder: int.from_bytes(decoder.take(decoder.count()), "little", signed=True),
    tags.FLOAT: _float,
    tags.TEXT: _text,
    tags.SHORT_TEXT: lambda decoder: str(decoder.take(decoder.byte()), "utf-8", "surrogatepass"),
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

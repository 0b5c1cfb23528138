"""The first byte of every encoded value: what follows.

Whole numbers in the encoding are little-endian. A count or a length has 4 bytes.

    NONE TRUE FALSE                        nothing
    NO_TUPLE NO_FROZENSET                  nothing: empty ones
    INT                                    8 bytes
    SMALL_INT                              1 byte: 0 to 255
    LONG                                   length, two's complement
    FLOAT                                  8 bytes
    TEXT BYTES PATH                        length, content; text as UTF-8, halves of surrogate pairs included
    SHORT_TEXT                             length (1 byte), UTF-8
    BUFFER                                 8-byte length; bytes, in the message's body
    LIST TUPLE SET FROZENSET               count, values
    DICT READ_ONLY                         count, keys and values in turn
    INTS FLOATS                            LIST or TUPLE, count, 8 bytes each: a sequence of numbers of one kind
    OBJECT                                 class, number of fields (1 byte), their values
    MEMBER                                 class, TEXT or SHORT_TEXT: an enum's member by its name
    SETTINGS                               class, DICT of all fields, FROZENSET of the names that were given
    ERROR                                  TUPLE of the links of its form (`penstock.error_form`)
    ARRAY TENSOR SCALAR                    TEXT of the dtype, TUPLE of the shape; the elements, in the message's body

A class is 2 bytes: the index of a class this message has named before, or the next index, followed by its name: length
(1 byte), UTF-8.
"""

from __future__ import annotations

import struct
from typing import Any

NONE, TRUE, FALSE, NO_TUPLE, NO_FROZENSET = range(1, 6)
INT, SMALL_INT, LONG, FLOAT, TEXT, SHORT_TEXT, BYTES, PATH, BUFFER = range(6, 15)
LIST, TUPLE, SET, FROZENSET, DICT, READ_ONLY, INTS, FLOATS = range(15, 23)
OBJECT, MEMBER, SETTINGS, ERROR, ARRAY, TENSOR, SCALAR = range(23, 30)
CONSTANTS = (None, None, True, False, (), frozenset[Any]())
"""What the lowest tags stand for, from 1 on."""

TAG_AND_INT = struct.Struct("<Bq")
TAG_AND_FLOAT = struct.Struct("<Bd")
TAG_AND_COUNT = struct.Struct("<BI")
TAG_AND_SIZE = struct.Struct("<BQ")
INT64 = struct.Struct("<q")
FLOAT64 = struct.Struct("<d")
COUNT = struct.Struct("<I")
SIZE = struct.Struct("<Q")
TAG_AND_INDEX = struct.Struct("<BH")
PACKED = struct.Struct("<BBI")

ALIGNMENT = 64
"""Every buffer of a body begins at a multiple of this."""
DEEPEST = 100
"""How deep values may be nested: more would overflow the stack before it is any use."""
MOST_CLASSES = 1000
"""How many classes one message may name."""
LONGEST_INLINE = 4096
"""Longer bytes go into the body."""
SHORTEST_PACKED = 8
"""From this many numbers on, a sequence is packed."""


def padding(size: int) -> int:
    """Bytes between the end of a buffer and the next one."""
    return -size % ALIGNMENT

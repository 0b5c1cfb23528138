"""What crosses to a reward process arrives as it was; what cannot is refused with its type."""

from __future__ import annotations

import datetime as dt
import enum
from collections import OrderedDict, namedtuple
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout.environments.rewards.plain_data import NotPlain, decode, encode

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(categories=None))
    | st.binary()
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.decimals(allow_nan=False)
)
KEYS = st.none() | st.integers() | st.text() | st.just("$dict") | st.tuples(st.integers())
PLAIN = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(st.integers())
        | st.frozensets(st.text())
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(PLAIN)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    text = encode(value)
    assert "\n" not in text
    assert same(decode(text.encode()), value)


class Colour(enum.IntEnum):
    """Numbers with names."""

    RED = 3


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (torch.tensor(2.0), 2.0),
        (Colour.RED, 3),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": (1,)}), {"a": (1,)}),
    ],
    ids=str,
)
def test_numbers_and_mappings_of_libraries_arrive_as_plain_ones(value: Any, arrives: Any) -> None:
    assert same(decode(encode(value)), arrives)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), r"builtins\.object"),
        ([1, {"a": np.zeros(3)}], r"numpy\.ndarray"),
        (namedtuple("Point", "x y")(1, 2), "Point"),
        (10**5000, "4300 digits"),
        (CYCLE, "recursion"),
    ],
    ids=["object", "array", "namedtuple", "long number", "cycle"],
)
def test_what_is_not_plain_is_refused_with_the_reason(value: Any, match: str) -> None:
    with pytest.raises(NotPlain, match=match):
        encode(value)


def test_dates_with_a_zone_keep_it() -> None:
    moment = dt.datetime(2024, 1, 2, 3, tzinfo=dt.UTC)
    assert decode(encode(moment)).utcoffset() == dt.timedelta(0)
    assert decode(encode(Decimal("1.10"))) == Decimal("1.10")

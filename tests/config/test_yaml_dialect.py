"""YAML without the traps of YAML 1.1."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.config.reading.yaml_dialect import parse_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-2E3", -2e3),
        ("1.5e-3", 1.5e-3),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("-3", -3),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("off", "off"),
        ("yes", "yes"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("~/models/tiny", "~/models/tiny"),
        ("1e", "1e"),
        ("none", "none"),
        ("reasoning_gym:chain_sum", "reasoning_gym:chain_sum"),
        ("'1e-5'", "1e-5"),
        ("[1, 2.0, x]", [1, 2.0, "x"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("{a: &x {b: 1}, c: {<<: *x, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_plain_scalars_are_what_they_look_like(text: str, value: Any) -> None:
    parsed = parse_yaml(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(parse_yaml(".nan"))


def test_a_merged_key_may_be_replaced() -> None:
    assert parse_yaml("{a: &x {b: 1}, c: {<<: *x, b: 2}}")["c"] == {"b": 2}


def test_short_lists_are_written_on_one_line() -> None:
    assert write_yaml({"betas": [0.9, 0.95], "rest": [[1], [2]]}) == "betas: [0.9, 0.95]\nrest:\n  - [1]\n  - [2]\n"


@pytest.mark.parametrize("text", ["\x85", "a\x85b", "line\n\x85\n", "\u2028", "\ufeff", "\t", " x ", "off", "1e-5"])
def test_text_is_read_as_it_was_written(text: str) -> None:
    assert parse_yaml(write_yaml({text: [text, {"nested": text}]})) == {text: [text, {"nested": text}]}

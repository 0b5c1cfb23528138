"""YAML that would grow, contain itself, or make other things than settings: refused with its place, at once."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.loading import load_config, parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.errors import ConfigError
from tests.config.settings import SMALLEST_YAML, file_problems, settings


def args_problem(path: Path, value: str) -> str:
    """The one line that a file with this value in `rollout.environment.args` is refused with."""
    content = f"model: {{path: some/model}}\nrollout:\n  environment:\n    kind: math\n    args:\n      x: {value}\n"
    (line,) = file_problems(path / "run.yaml", content)
    return line


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("!!int abc", "'abc' is not a whole number, as its tag says"),
        ("!!int 1.5", "'1.5' is not a whole number, as its tag says"),
        ("!!float abc", "'abc' is not a number, as its tag says"),
        ("!!bool maybe", "'maybe' is not true or false, as its tag says"),
        ("!!null x", "'x' is not null, as its tag says"),
        ("!!timestamp x", "the tag !!timestamp is not allowed here; write the value without it"),
        ("!!timestamp 2024-01-01", "the tag !!timestamp is not allowed here; write the value without it"),
        ("!!binary '%'", "the tag !!binary is not allowed here; write the value without it"),
        ("!!binary aGk=", "the tag !!binary is not allowed here; write the value without it"),
        ("!!set {a}", "the tag !!set is not allowed here; write the value without it"),
        ("!!omap [a: 1]", "the tag !!omap is not allowed here; write the value without it"),
        (
            "!!python/object:os.system {}",
            "the tag !!python/object:os.system is not allowed here; write the value without it",
        ),
        ("!mine x", "the tag !mine is not allowed here; write the value without it"),
        ("!!int [1]", "the tag !!int is not allowed here; write the value without it"),
        ("!!map x", "the tag !!map is not allowed here; write the value without it"),
        ("9" * 5000, f"'{'9' * 37}...' is a whole number of 5,000 digits; at most 300 are read"),
        ("0x" + "f" * 5000, f"'0x{'f' * 35}...' is a whole number of 5,002 digits; at most 300 are read"),
        ("1e999", "'1e999' is larger than a number can be; write .inf if infinity is meant"),
        ("-1e999", "'-1e999' is larger than a number can be; write .inf if infinity is meant"),
        ("&a [*a]", "an alias inside its own anchor: it would contain itself"),
        ("&a {y: {z: *a}}", "an alias inside its own anchor: it would contain itself"),
    ],
)
def test_a_value_that_no_setting_has_is_refused_with_its_place(tmp_path: Path, value: str, reason: str) -> None:
    assert args_problem(tmp_path, value) == f"line 6, column 10: {reason}"


def lists(levels: int, width: int = 10) -> str:
    """`width ** levels` values in a few hundred characters."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int) -> str:
    """Mappings that take over the one before it ten times, all of whose keys are copied each time."""
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


def chain(levels: int) -> str:
    """Short lines, one inside the other once aliases are written out."""
    return "\n".join(["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, levels)])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lists(12), "expands to more than 20,000 values once its aliases are written out"),
        (merges(12), "expands to more than 20,000 values once its aliases are written out"),
        ("a: [" + "x," * 25_000 + "]", "expands to more than 20,000 values once its aliases are written out"),
        (chain(500), "it is nested too deeply: more than 50 levels"),
        ("a: " + "[" * 20_000, "it is nested too deeply: more than 50 levels"),
        ("a: " + "{a: " * 5_000, "it is nested too deeply: more than 50 levels"),
        ("- " * 20_000, "it is nested too deeply: more than 50 levels"),
    ],
    ids=["aliases", "merges", "plain", "chain", "lists", "mappings", "blocks"],
)
def test_a_few_lines_that_stand_for_billions_are_refused_in_bounded_time_and_memory(
    tmp_path: Path, content: str, reason: str
) -> None:
    tracemalloc.start()
    try:
        begun = time.monotonic()
        (line,) = file_problems(tmp_path / "run.yaml", content)
        took, (_, peak) = time.monotonic() - begun, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert line.startswith("line ")
    assert line.endswith(reason)
    assert took < 60
    assert peak < 100 * 2**20


def test_aliases_and_merges_of_the_usual_kind_are_read() -> None:
    text = "{a: &a {x: 1}, b: &b {<<: *a, y: 2}, c: [*a, *b], d: {<<: [*a, *b]}}"
    shared = {"x": 1, "y": 2}
    assert parse_yaml(text) == {"a": {"x": 1}, "b": shared, "c": [{"x": 1}, shared], "d": shared}


def test_a_file_that_is_no_configuration_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is larger than 1,048,576 bytes, so it is not a configuration"):
        load_config("/dev/zero")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("training.max_steps=" + "9" * 5000, "is a whole number of 5,000 digits; at most 300 are read"),
        ("training.max_steps=!!int abc", "'abc' is not a whole number, as its tag says"),
        ("training.optimizer.lr=1e999", "'1e999' is larger than a number can be; write .inf if infinity is meant"),
        ("rollout.environment.args=&a {x: *a}", "an alias inside its own anchor: it would contain itself"),
        ("rollout.environment.args=" + "[" * 1000, "it is nested too deeply: more than 50 levels"),
        ("rollout.environment.args=!!set {a}", "the tag !!set is not allowed here; write the value without it"),
    ],
)
def test_overrides_are_held_to_the_same(tmp_path: Path, override: str, reason: str) -> None:
    key = override.partition("=")[0]
    (line,) = file_problems(tmp_path / "run.yaml", SMALLEST_YAML, override)
    assert line.startswith(f"{key}: ")
    assert line.endswith(reason)


def itself() -> dict[str, Any]:
    args: dict[str, Any] = {}
    args["x"] = [args]
    return args


def deep() -> dict[str, Any]:
    args: dict[str, Any] = {}
    for _ in range(10_000):
        args = {"x": args}
    return args


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (itself(), "rollout.environment.args.x[0]: contains itself"),
        (deep(), "rollout.environment.args: is nested too deeply: more than 50 levels"),
        ({"x": 10**5000}, "rollout.environment.args.x: is a whole number of more than 300 digits"),
    ],
    ids=["itself", "deep", "digits"],
)
def test_settings_of_a_program_are_held_to_the_same(args: dict[str, Any], line: str) -> None:
    data = settings()
    data["rollout"]["environment"]["args"] = args
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert caught.value.problems == [line]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is empty; give a path"),
        (" ", "is empty; give a path"),
        ("a\0b", "contains a NUL character, which no path can have"),
        ("x" * 300, "has a name of 300 bytes in it; at most 255 are possible"),
        ("é" * 200, "has a name of 400 bytes in it; at most 255 are possible"),
        ("x/" * 3000, "is a path of 6,000 bytes; at most 3,500 are possible"),
    ],
    ids=["empty", "blank", "NUL", "name", "bytes", "path"],
)
@pytest.mark.parametrize(
    "key",
    [
        "run_dir",
        "model.path",
        "model.lora.path",
        "data.train_path",
        "data.eval_path",
        "rollout.replay_from",
        "observe.tensorboard.folder",
    ],
)
def test_a_path_that_no_file_can_have_is_refused_with_its_key(key: str, path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings(**{key.replace(".", "__"): path}))
    assert f"{key}: {reason}" in caught.value.problems or (
        path == "" and any(line.startswith(f"{key}: ") for line in caught.value.problems)
    )

"""Settings of environments and data: needed ones, wrong ones, and ones that would have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.reading.loading import dump_config, parse_config
from penstock.config.reading.yaml_dialect import parse_yaml
from tests.config.settings import problems, settings


def with_kind(kind: str, data: dict[str, Any] | None = None, **environment: Any) -> dict[str, Any]:
    return {"rollout__environment": {"kind": kind, **environment}, "data": data or {}}


def several(*rewards: dict[str, Any], **environment: Any) -> dict[str, Any]:
    return with_kind("function", {"train_path": "d.jsonl"}, rewards=list(rewards), **environment)


FUNCTION = {"import_path": "m:f"}
FILE = {"train_path": "d.jsonl"}
HUB = {"train_path": "gsm8k", "eval_path": "gsm8k"}


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (with_kind("math"), ["data.train_path: is needed with rollout.environment.kind = math"]),
        (with_kind("custom"), ["rollout.environment.import_path: is needed with kind = custom"]),
        (with_kind("custom", import_path="m"), ["rollout.environment.import_path: 'm' is not module:Class"]),
        (with_kind("function", FILE, import_path="m"), ["rollout.environment.import_path: 'm' is not module:callable"]),
        (several({"import_path": "m"}), ["rollout.environment.rewards[0].import_path: 'm' is not module:callable"]),
        (
            several({"import_path": "m:f"}, {"import_path": "n:f"}),
            ["rollout.environment.rewards[1].name: 'f' is also the name of rollout.environment.rewards[0]; rename"],
        ),
        (
            several({"import_path": "m:f", "name": "a/b"}),
            [
                "rollout.environment.rewards[0].name: 'a/b' cannot be part of a metric's name; use "
                "letters, digits, _, - and ."
            ],
        ),
        (
            several({"import_path": "m:f"}, args={"a": 1}),
            ["rollout.environment.args: has no effect together with "],
        ),
        (
            several({"import_path": "m:f", "wieght": 1}),
            ["rollout.environment.rewards[0].wieght: unknown setting; did you mean rollout.environment.rewards[0].w"],
        ),
        (several({"weight": 1}), ["rollout.environment.rewards[0].import_path: is required. `module:callable`"]),
        (
            several({"import_path": "m:f", "weight": "much"}),
            ["rollout.environment.rewards[0].weight: expected a number, got 'much'"],
        ),
        (
            several({"import_path": "m:f", "weight": float("nan")}),
            ["rollout.environment.rewards[0].weight: must be a finite number"],
        ),
        (several(), ["rollout.environment.rewards: "]),
        (
            several({"import_path": "m:f", "weight": 0}, {"import_path": "m:g", "weight": -0.0}),
            ["rollout.environment.rewards: every weight is 0"],
        ),
        (with_kind("verifiers:gsm8k"), ["data.chat_template: must be true"]),
        (with_kind("calculator", {"chat_template_kwargs": {"a": 1}}), ["data.chat_template_kwargs: has no effect"]),
        (with_kind("verifiers:"), ["rollout.environment.kind: unknown 'verifiers:'"]),
        (with_kind("calculater"), ["rollout.environment.kind: unknown 'calculater'; did you mean calculator?"]),
        (with_kind("calculator:sum"), ["rollout.environment.kind: unknown 'calculator:sum'"]),
        (with_kind("poetry"), ["rollout.environment.kind: unknown 'poetry'; choose one of math, calculator"]),
    ],
)
def test_what_an_environment_needs_is_named(given: dict[str, Any], lines: list[str]) -> None:
    found = problems(**given)
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True)), found


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (with_kind("calculator", import_path="m:f"), ["rollout.environment.import_path"]),
        (with_kind("calculator", in_process=True), ["rollout.environment.in_process"]),
        (with_kind("verifiers:x", {"chat_template": True}, in_process=True), ["rollout.environment.in_process"]),
        (with_kind("math", FILE, import_path="m:C"), ["rollout.environment.import_path"]),
        (with_kind("math", FILE, rewards=[{"import_path": "m:f"}]), ["rollout.environment.rewards"]),
        (several({"import_path": "m:f"}, import_path="m:g"), ["rollout.environment.import_path"]),
        (with_kind("reasoning_gym:chain_sum", import_path="m:C"), ["rollout.environment.import_path"]),
        (with_kind("calculator", {"train_path": "d.jsonl"}), ["data.train_path"]),
        (with_kind("calculator", {"train_split": "train"}), ["data.train_split"]),
        (with_kind("verifiers:x", {"chat_template": True, "eval_path": "d.jsonl"}), ["data.eval_path"]),
        (with_kind("function", FILE | {"subset": "main"}, **FUNCTION), ["data.subset"]),
        (with_kind("function", FILE | {"download": True}, **FUNCTION), ["data.download"]),
        (with_kind("function", FILE | {"train_split": "train"}, **FUNCTION), ["data.train_split"]),
        (with_kind("function", {"train_path": "gsm8k", "eval_split": "test"}, **FUNCTION), ["data.eval_split"]),
        (with_kind("function", FILE | {"eval_size": 5}, **FUNCTION), ["data.eval_size"]),
        (with_kind("function", HUB | {"format": "parquet", "subset": "main"}, **FUNCTION), ["data.subset"]),
        (
            with_kind("custom", {"prompt_key": "q", "format": "jsonl"}, import_path="m:C"),
            ["data.prompt_key", "data.format"],
        ),
    ],
)
def test_settings_without_effect_are_rejected(given: dict[str, Any], keys: list[str]) -> None:
    assert [line.partition(":")[0] for line in problems(**given)] == keys


@pytest.mark.parametrize(
    ("kind", "args", "start"),
    [
        ("math", {"corect": 1.0}, "corect: unknown setting; did you mean correct?"),
        ("math", {"correct": "high"}, "correct: expected a number, got 'high'"),
        ("math", {"wrong": float("nan")}, "wrong: must be a finite number"),
        ("math", {"undecided": "low"}, "undecided: expected a number, got 'low'"),
        ("calculator", {"max_terms": 1}, "min_terms: 2 is more than max_terms = 1"),
        ("calculator", {"operators": ["+", "^"]}, "operators[1]: input should be '+'"),
        ("calculator", {"operators": []}, "operators: "),
        ("calculator", {"max_digits": 99}, "max_digits: must be at most 9, got 99"),
        ("calculator", {"prompt": "What is it?"}, "prompt: must contain {expression}"),
        ("calculator", {"max_turns": 0}, "max_turns: must be more than 0"),
    ],
)
def test_args_of_built_in_environments_are_checked(kind: str, args: dict[str, Any], start: str) -> None:
    [line] = problems(**with_kind(kind, FILE if kind == "math" else None, args=args))
    assert line.startswith(f"rollout.environment.args.{start}"), line


@pytest.mark.parametrize(
    "given",
    [
        with_kind("math", FILE | {"eval_path": "e.parquet", "eval_size": 9}, args={"wrong": -1, "undecided": 0}),
        with_kind("math", HUB | {"subset": "main", "train_split": "train", "eval_split": "test", "download": True}),
        with_kind("function", {"train_path": "d.jsonl", "eval_path": "gsm8k", "eval_split": "test"}, **FUNCTION),
        with_kind("calculator", args={"max_turns": 2, "operators": ["*"]}, workers=2, timeout_seconds=1),
        with_kind("verifiers:gsm8k", {"chat_template": True, "train_size": 5}, args={"agent": {"max_turns": 2}}),
        with_kind("custom", import_path="m:C", args={"anything": 1}, in_process=True),
        with_kind("custom", FILE | {"prompt_key": "q"}, import_path="m:C"),
    ],
)
def test_settings_that_belong_together_are_accepted_and_survive_a_dump(given: dict[str, Any]) -> None:
    config = parse_config(settings(**given))
    assert parse_config(parse_yaml(dump_config(config))) == config

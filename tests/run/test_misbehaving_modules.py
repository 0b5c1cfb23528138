"""Modules of the user's that end the process, or try to, where they are imported, made or asked: a wrong setting."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.reading.loading import dump_config
from penstock.errors import ConfigError, SetupError
from penstock.rollout.environments.tasks import reasoning_gym_trial
from penstock.run.checks import check_config
from tests.cli.programs import penstock
from tests.run.conftest import ConfigMaker

MODULES = "tests.support.misbehaving"
RAISED = [
    ("exits:x", "SystemExit: 0"),
    ("interrupts:x", "KeyboardInterrupt"),
    ("raises_strangely:x", "Strange: \ufffdx"),
]


def custom(make_config: ConfigMaker, path: str) -> Any:
    return make_config(**{"data": {}, "rollout.environment": {"kind": "custom", "import_path": f"{MODULES}.{path}"}})


def sampler(make_config: ConfigMaker, path: str) -> Any:
    return make_config(staleness={"policy": "custom", "import_path": f"{MODULES}.{path}"})


def problem(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    (line,) = caught.value.problems
    assert len(line) < 3_000
    return line


@pytest.mark.parametrize(("name", "raised"), RAISED)
def test_a_module_that_raises_anything_while_it_is_imported(make_config: ConfigMaker, name: str, raised: str) -> None:
    module = f"{MODULES}.{name.partition(':')[0]}"
    expected = f"rollout.environment.import_path: module '{module}' cannot be imported: {raised}"
    assert problem(custom(make_config, name)).startswith(expected)
    assert problem(sampler(make_config, name)).startswith(
        f"staleness.import_path: {MODULES}.{name} cannot be imported: {raised}"
    )
    sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ExitsWhenMade", "cannot be constructed: SystemExit: 0"),
        ("SaysNothing", "cannot be constructed: Unspeakable: (its text is not available: ValueError)"),
        ("ExitsInPrompts", "prompts(Split.TRAIN) raised SystemExit: 0"),
        ("InterruptsInPrompts", "prompts(Split.TRAIN) raised KeyboardInterrupt"),
        ("NumbersForText", "gives a Prompt whose prompt_id or text is not text"),
        ("SameAfterRepair", "gives two prompts with the same prompt_id"),
        ("nothing", "cannot be imported: RuntimeError: no nothing here"),
    ],
)
def test_an_environment_that_ends_the_process_or_is_none(make_config: ConfigMaker, name: str, reason: str) -> None:
    line = problem(custom(make_config, f"names:{name}"))
    assert line.startswith("rollout.environment.import_path: ")
    assert reason in line


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ExitingSampler", f"staleness.args: {MODULES}.names:ExitingSampler cannot be constructed: SystemExit: 0"),
        (
            "UnsureSampler",
            "staleness.import_path: required_capacity of the staleness policy on_policy raised TypeError: ",
        ),
    ],
)
def test_a_sampler_that_ends_the_process_or_cannot_be_used(make_config: ConfigMaker, name: str, line: str) -> None:
    assert problem(sampler(make_config, f"names:{name}")).startswith(line)


def test_the_shell_sees_code_2_and_the_key(make_config: ConfigMaker, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(custom(make_config, "exits:x")), encoding="utf-8")
    done = penstock("config", "check", str(tmp_path / "run.yaml"), cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert f"rollout.environment.import_path: module '{MODULES}.exits' cannot be imported: SystemExit: 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"max_digits": 2**31}, id="lock"),
        pytest.param({"max_terms": 2**31}, id="loop", marks=pytest.mark.long),
    ],
)
def test_a_task_that_would_take_for_ever_is_given_up(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, args: dict[str, int]
) -> None:
    monkeypatch.setattr(reasoning_gym_trial, "_SECONDS", 2.0)
    before = os.times().children_user
    line = problem(make_config(**{"rollout.environment.args": args}))
    assert line.startswith("rollout.environment.args: chain_sum cannot make a prompt with these values ")
    assert os.times().children_user > before  # it was tried elsewhere


def test_large_values_that_a_task_can_use_are_fine(make_config: ConfigMaker) -> None:
    check_config(
        make_config(
            **{
                "rollout.environment.kind": "reasoning_gym:number_format",
                "rollout.environment.args": {"max_n": 5_000_000_000.0},
            }
        )
    )


def test_a_value_that_a_task_stumbles_over_later_is_the_settings_fault(make_config: ConfigMaker) -> None:
    line = problem(make_config(**{"rollout.environment.args": {"min_terms": 1.5, "max_terms": 3}}))
    assert line.startswith("rollout.environment.args: chain_sum cannot make a prompt with these values: ")


def test_a_function_that_does_not_say_what_it_takes(make_config: ConfigMaker, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}', encoding="utf-8")
    environment = {"kind": "function", "import_path": "builtins:max"}
    config = make_config(**{"data": {"train_path": str(tmp_path / "d.jsonl")}, "rollout.environment": environment})
    check_config(config)  # nothing is known of it, so nothing is held against it


@pytest.mark.parametrize("host", [".", "x" * 300, "é" * 90], ids=["dot", "long", "idna"])
def test_an_address_that_no_host_can_have(make_config: ConfigMaker, host: str) -> None:
    with pytest.raises(SetupError, match=r"observe\.prometheus\.host: cannot listen on"):
        check_config(make_config(**{"observe.prometheus": {"host": host, "port": 0}}))

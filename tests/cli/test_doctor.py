"""Which parts work: found out in processes of their own."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import penstock.run.doctor
from penstock.cli.main import app
from penstock.run.doctor import PARTS, Diagnosis, Part, PartStatus, examine, examine_python, failure_reason
from tests.cli.programs import penstock as run_penstock

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_STDLIB = Part("yaml", "a test", "yaml", ("PyYAML",), "pyyaml>=6", used=True)


def part(code: str, **changes: Any) -> Part:
    return replace(_STDLIB, probe=code, **changes)


def test_part_that_imports_works_and_has_a_version() -> None:
    diagnosis = examine(_STDLIB)
    assert diagnosis.status is PartStatus.WORKS
    assert diagnosis.version
    assert diagnosis.as_object()["install"] is None


def test_missing_part_says_how_to_install_it() -> None:
    diagnosis = examine(Part("nope", "a test", "nope_nope", ("nope-nope",), "nope>=1", used=True))
    assert diagnosis.status is PartStatus.MISSING
    assert diagnosis.as_object()["install"] == "pip install 'nope>=1'"


def test_details_are_the_last_line_a_probe_prints() -> None:
    assert examine(part("print('noise'); print('{\"detail\": \"8 threads\"}')")).detail == "8 threads"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed on import with SIGSEGV"),
        ("import os; os._exit(3)", "import ended with exit code 3"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import nope_nope", "needs the Python package nope_nope, which is not installed"),
        (
            "import ctypes; ctypes.CDLL('libnope.so.1')",
            "needs the native library libnope.so.1, which this machine does not have",
        ),
    ],
)
def test_broken_part_says_why(code: str, reason: str) -> None:
    diagnosis = examine(part(code))
    assert (diagnosis.status, diagnosis.detail) == (PartStatus.BROKEN, reason)


def test_part_that_hangs_is_given_up() -> None:
    assert examine(part("import time; time.sleep(60)"), seconds=0.3).detail == "did not import within 0.3 s"


def test_library_of_an_import_error_is_named() -> None:
    stderr = "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"
    assert failure_reason(1, stderr).startswith("needs the native library libcudart.so.12")


@pytest.mark.parametrize("library", ["libcudart.so.12", "libnuma.so.1"])
def test_only_mooncake_gets_mooncakes_advice(library: str) -> None:
    diagnosis = examine(part(f"raise ImportError('{library}: cannot open shared object file')"))
    assert diagnosis.detail == f"needs the native library {library}, which this machine does not have"
    assert [each.name for each in PARTS if each.about_library is not _STDLIB.about_library] == ["mooncake"]


def test_old_python_is_broken() -> None:
    assert examine_python((3, 10, 1)).is_fatal
    assert not examine_python().is_fatal


def test_install_commands_ask_for_the_versions_of_the_project() -> None:
    project = tomllib.loads(_PROJECT.read_text())["project"]
    asked = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    assert {part.requirement for part in PARTS if part.install} <= set(asked)


def test_every_optional_part_that_is_used_comes_with_an_extra() -> None:
    extras = tomllib.loads(_PROJECT.read_text())["project"]["optional-dependencies"]
    for part in PARTS:
        if part.install and not part.core:
            assert part.requirement in extras[part.extra]
    brought = {part.extra for part in PARTS}
    assert set(extras) - {"dev"} == brought - {None}


def test_a_part_this_version_has_no_use_for_is_not_offered() -> None:
    assert [part.install for part in PARTS if not part.used] == [None] * 5


def test_packages_of_single_environments_are_no_core_parts() -> None:
    assert {part.name for part in PARTS if part.core} == {"torch", "transformers"}


def test_core_parts_are_dependencies_of_the_project() -> None:
    dependencies = tomllib.loads(_PROJECT.read_text())["project"]["dependencies"]
    assert {part.requirement for part in PARTS if part.core} <= set(dependencies)


class TestCommand:
    def shown(self, monkeypatch: pytest.MonkeyPatch, *diagnoses: Diagnosis, as_json: bool = False) -> tuple[int, str]:
        monkeypatch.setattr(penstock.run.doctor, "examine_all", lambda: list(diagnoses))
        result = CliRunner().invoke(app, ["doctor", *["--json"] * as_json])
        return result.exit_code, result.stdout

    def test_optional_parts_do_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = next(part for part in PARTS if part.name == "ray")
        code, text = self.shown(monkeypatch, examine_python(), Diagnosis(ray, PartStatus.BROKEN, "2.50", "crashed"))
        assert code == 0
        assert "ray  broken  2.50  crashed; not used by this version\n" in text
        assert "Everything a run needs works" in text

    def test_missing_part_is_shown_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        math = next(part for part in PARTS if part.name == "math-verify")
        code, text = self.shown(monkeypatch, examine_python(), Diagnosis(math, PartStatus.MISSING))
        assert code == 0
        assert re.search(r"math-verify +not installed +pip install 'math-verify>=0.8' \(extra: math\)", text)

    def test_it_says_what_runs_where(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.runtime.cpu.usable_cores", lambda: 8)
        monkeypatch.setattr("penstock.run.where.usable_cores", lambda: 8)
        _, text = self.shown(monkeypatch, examine_python())
        assert re.search(
            r"engine ranks +a thread of the run's process each +4 of 8 cores .*runtime\.engine_process: true", text
        )
        _, content = self.shown(monkeypatch, examine_python(), as_json=True)
        assert [home["part"] for home in json.loads(content)["where"]] == [
            "controller",
            "engine ranks",
            "rewards",
            "trainer",
            "row worker",
        ]

    def test_broken_core_part_is_exit_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = Diagnosis(replace(_STDLIB, name="torch", core=True), PartStatus.MISSING)
        code, text = self.shown(monkeypatch, torch)
        assert code == 1
        assert "torch must work before a run can start." in text
        code, text = self.shown(monkeypatch, torch, as_json=True)
        assert (code, json.loads(text)["ok"]) == (1, False)

    def test_this_machine(self) -> None:
        done = run_penstock("doctor", "--json")
        content = json.loads(done.stdout)
        parts = {part["name"]: part for part in content["parts"]}
        assert (done.returncode, content["ok"]) == (0, True)
        assert "CPU threads" in parts["torch"]["detail"]
        assert {name for name, part in parts.items() if part["used_by_this_version"]} == {
            "python",
            "torch",
            "transformers",
            "reasoning-gym",
            "math-verify",
            "verifiers",
            "shared memory",
            "datasets",
            "pyarrow",
            "peft",
            "tensorboard",
            "wandb",
            "mlflow",
            "prometheus-client",
        }

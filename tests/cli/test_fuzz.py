"""`penstock config check` on thousands of spoiled configurations: a word about what is wrong, never a traceback."""

from __future__ import annotations

import io
import json
import random
import re
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from penstock.cli.main import app
from penstock.config.models import RunConfig
from penstock.config.reading.keys import all_keys
from penstock.config.reading.yaml_dialect import write_yaml
from penstock.rollout.environments.tasks import reasoning_gym_trial
from tests.support.config_mutations import misleading_values, misled, mutated, override, valid_settings

_COMMAND = get_command(app)
LONGEST_SECONDS = 20.0
"""For one of them, on a busy machine."""
_KEY = re.compile(
    rf"(?<![\w.])(?:{'|'.join(re.escape(key) for key in sorted(all_keys(RunConfig), key=len, reverse=True))})(?!\w)"
)
_PLACE = re.compile(r"\bline \d+\b|at the top of the file")
_UNKNOWN = re.compile(r".+: unknown setting; ", re.DOTALL)
"""Names what was written, even if no key can look like that."""
_REACHED = (
    "run_dir",
    "model.path",
    "rollout.environment",
    "data.train_path",
    "staleness.import_path",
    "staleness.args",
)
_REACHED_TOO = ("rollout.replay_from", "observe.tensorboard", "buffer.max_buffered_groups", "rollout.group_size")


@dataclass(frozen=True)
class Result:
    """What the shell sees of a command, and what it raised."""

    exit_code: int
    stdout: str
    stderr: str
    raised: BaseException | None


def check(*arguments: str, as_json: bool = True) -> Result:
    """`penstock config check` in this process, error reporting and exit code included."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    code, raised = 0, None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            _COMMAND.main(["config", "check", *arguments, *["--json"] * as_json], prog_name="penstock")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - the test says what it was
            code, raised = 1, error
    for stream in (out, err):
        stream.seek(0)
    return Result(code, out.read(), err.read(), raised)


def outcome(result: Result, content: bytes, overrides: list[str]) -> str:
    """What the command came to: `OK`, `place`, or how far it got and the beginning of the key; fails for all else."""
    about = f"{content!r} with {overrides!r}: {result}"
    assert result.raised is None, about
    assert result.exit_code in (0, 2), about
    said = json.loads(result.stdout)
    assert said["ok"] == (result.exit_code == 0), about
    assert "Traceback" not in result.stderr, about
    if said["ok"]:
        return "OK"
    error = said["error"]
    assert error["type"] in ("ConfigError", "CannotStart"), about
    for problem in error["problems"]:
        key, reason = problem["key"], problem["reason"]
        echoed = error["source"] == "command line" and reason.startswith(overrides[0][:10])
        assert key or echoed or _PLACE.search(reason) or _KEY.search(reason) or _UNKNOWN.match(reason), about
        assert len(reason) < 5_000, about
    key = error["problems"][0]["key"]
    if not key:
        return "place"
    return f"{'values' if error['type'] == 'ConfigError' else 'deep'}/{_short(key) if _KEY.match(key) else 'unknown'}"


def _short(key: str) -> str:
    return ".".join(key.split(".")[:2])


@pytest.mark.parametrize("mutations", [300, pytest.param(2_000, marks=pytest.mark.long)])
def test_spoiled_configurations_are_refused_with_a_key_or_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutations: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reasoning_gym_trial, "_SECONDS", 3.0)
    rng = random.Random(20)
    bases, misleading = valid_settings(tmp_path), misleading_values(tmp_path)
    path = tmp_path / "run.yaml"
    outcomes: Counter[str] = Counter()
    for number in range(mutations):
        base = rng.choice(bases)
        content = misled(base, misleading, rng) if number % 3 == 0 else mutated(base, rng)
        overrides = [override(rng)] if rng.random() < 0.1 else []
        path.write_bytes(content)
        begun = time.monotonic()
        result = check(str(path), *overrides)
        assert time.monotonic() - begun < LONGEST_SECONDS, f"{content!r} with {overrides!r}"
        outcomes[outcome(result, content, overrides)] += 1
    told = outcomes.most_common()
    assert outcomes["OK"] > mutations / 20, told
    assert outcomes["place"] > mutations / 20, told
    assert sum(count for name, count in told if name.startswith("values/")) > mutations / 5, told
    reached = [key for key in (*_REACHED, *_REACHED_TOO) if outcomes[f"deep/{key}"]]  # what only the parts find out
    assert len(reached) >= 5, told
    if mutations >= 2_000:
        assert all(outcomes[f"deep/{key}"] >= 3 for key in (*_REACHED, *_REACHED_TOO)), told


def test_the_configurations_that_are_spoiled_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in valid_settings(tmp_path):
        path = tmp_path / "run.yaml"
        path.write_text(write_yaml(settings), encoding="utf-8")
        assert check(str(path)).exit_code == 0


@pytest.mark.parametrize("name", ["", "x" * 5000, "a/" * 3000, "\udcff.yaml", "a\nb"])
def test_a_configuration_file_with_an_impossible_name(name: str) -> None:
    result = check(name)
    assert (result.exit_code, result.raised) == (2, None)


def test_a_configuration_file_whose_name_is_not_unicode(tmp_path: Path) -> None:
    settings = valid_settings(tmp_path)[0]
    path = tmp_path / "run\udcff.yaml"
    path.write_text(write_yaml(settings), encoding="utf-8")
    assert check(str(path)).exit_code == 0
    assert check(str(path), as_json=False).stdout == f"{tmp_path}/run\ufffd.yaml: OK\n"

"""A checkpoint proves itself: whatever was done to it is seen before anything of it is opened."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.config.reading.loading import load_config
from penstock.errors import SetupError
from penstock.run.checkpoint_check import damage, require_good
from penstock.run.checkpoint_folders import checkpoints
from penstock.run.evaluate import evaluate
from penstock.run.file_digests import file_digests
from penstock.run.identity import RunIdentity
from penstock.run.seal import SEAL, Seal
from tests.run.conftest import run_config
from tests.run.test_resume import LETTERS, ends, lines
from tests.support.pickles import write_harmful_pickle

LEDGER = "controller/ledger.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run of three steps with a checkpoint of each; tests work on copies."""
    changes: dict[str, Any] = {
        "rollout.environment": LETTERS,
        "checkpoint.every_steps": 1,
        "checkpoint.keep_latest": 100,
        "eval.at_start": False,
        "eval.at_end": False,
    }
    folder = tmp_path_factory.mktemp("finished")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(24)))
    data = {"data.train_path": str(prompts), "data.eval_path": str(prompts), "data.train_size": None}
    return penstock.train(run_config(folder / "run", model_folder, **changes, **data)).run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def flip(path: Path, position: int = -1, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    path.with_name("elsewhere").rename(path.parents[2] / "elsewhere")


def of_another_run(step: Path) -> None:
    replace(Seal.read(step), run_id="0123456789abcdef").write(step)


def without_digests(step: Path) -> None:
    (step / SEAL).write_text(json.dumps({"step": 3, "metric": "eval/reward_mean", "value": None}) + "\n")


def pickled_instead(step: Path) -> None:
    (step / "model.safetensors").unlink()
    write_harmful_pickle(step / "pytorch_model.bin")


def copied(step: Path) -> None:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("step_2"), step)


def brought_from_step_2(name: str) -> Callable[[Path], None]:
    return lambda step: shutil.copy(step.with_name("step_2") / name, step / name) and None


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped byte": (lambda s: flip(s / "model.safetensors"), r"model\.safetensors: its content has changed"),
    "flipped tokenizer": (lambda s: flip(s / "tokenizer.json"), r"tokenizer\.json: its content has changed"),
    "edited settings": (
        lambda s: flip(s / "controller/config.yaml"),
        r"controller/config\.yaml: its content has changed",
    ),
    "weights of another step": (
        brought_from_step_2("model.safetensors"),
        r"model\.safetensors: its content has changed",
    ),
    "moments of another step": (
        brought_from_step_2("trainer/optimizer.safetensors"),
        r"trainer/optimizer\.safetensors: its content has changed",
    ),
    "seal of another step": (brought_from_step_2(SEAL), r"penstock\.json: is of step 2, not 3"),
    "copied step": (copied, r"penstock\.json: is of step 2, not 3: the folder was copied or renamed"),
    "another run": (of_another_run, r"penstock\.json: belongs to another run \(0123456789abcdef; this one is "),
    "zeroed ledger": (lambda s: zero(s / LEDGER), r"controller/ledger\.safetensors: its content has changed"),
    "shortened ledger": (lambda s: cut(s / LEDGER), r"controller/ledger\.safetensors: has \d+ bytes, but \d+ were"),
    "no config.json": (lambda s: (s / "config.json").unlink(), r" config\.json: is missing"),
    "no ledger": (lambda s: (s / LEDGER).unlink(), r"controller/ledger\.safetensors: is missing"),
    "more": (
        lambda s: (s / "trainer/notes.txt").write_text("x") and None,
        r"trainer/notes\.txt: is not a file of this",
    ),
    "a pickle more": (
        lambda s: write_harmful_pickle(s / "pytorch_model.bin") and None,
        r"pytorch_model\.bin: is a pickle",
    ),
    "a pickle instead": (pickled_instead, r"pytorch_model\.bin: is a pickle"),
    "a link": (lambda s: linked(s / "config.json"), r"config\.json: is no longer a regular file"),
    "cut seal": (lambda s: cut(s / SEAL), r"penstock\.json: its content has changed"),
    "empty seal": (lambda s: (s / SEAL).write_text("") and None, r"penstock\.json: cannot be read"),
    "a seal that is a number": (lambda s: (s / SEAL).write_text("3") and None, r"penstock\.json: cannot be read"),
    "no digests": (without_digests, r"penstock\.json: has no digests of the checkpoint's files"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_its_file_with_the_newest_good_one(run_dir: Path, what: str) -> None:
    act, expected = DAMAGES[what]
    step = run_dir / "checkpoints/step_3"
    act(step)
    before = (run_dir / "metrics.jsonl").read_bytes(), (run_dir / "config.yaml").read_bytes()
    for command, use in (
        ("resume", lambda: penstock.resume(run_dir, ["training.max_steps=4"])),
        ("eval", lambda: evaluate(load_config(run_dir / "config.yaml"), run_dir)),
    ):
        with pytest.raises(SetupError, match=expected) as caught:
            use()
        assert "checkpoint step_3 in" in str(caught.value)
        assert f"newest good one is step_2: penstock {command} {run_dir} --checkpoint step_2" in str(caught.value)
    assert not list(run_dir.rglob("opened_*"))
    assert before == ((run_dir / "metrics.jsonl").read_bytes(), (run_dir / "config.yaml").read_bytes())
    assert [path.name for path in checkpoints(run_dir / "checkpoints")] == ["step_1", "step_2", "step_3"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_of_any_file_is_refused_with_the_files_name(finished: Path, data: st.DataObject) -> None:
    step = finished / "checkpoints/step_3"
    names = sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from(names))
    position = data.draw(st.integers(0, (step / name).stat().st_size - 1))
    bit = data.draw(st.integers(0, 7))
    flip(step / name, position, bit)
    try:
        with pytest.raises(SetupError) as caught:
            require_good(step, RunIdentity.read(finished).run_id, "resume")
    finally:
        flip(step / name, position, bit)
    assert f"\n  {name}: " in str(caught.value)
    assert not damage(step, RunIdentity.read(finished).run_id, 3)


def test_the_newest_good_one_is_looked_for_among_damaged_ones(run_dir: Path) -> None:
    for step in ("step_3", "step_2"):
        flip(run_dir / "checkpoints" / step / "model.safetensors")
    with pytest.raises(SetupError, match=r"newest good one is step_1: penstock resume .* --checkpoint step_1"):
        penstock.resume(run_dir)
    with pytest.raises(SetupError, match=r"checkpoint step_2 in .*cannot be used"):
        penstock.resume(run_dir, checkpoint="step_2")
    flip(run_dir / "checkpoints/step_1" / "model.safetensors")
    with pytest.raises(SetupError, match="No other checkpoint of the run can be used"):
        penstock.resume(run_dir)


def test_the_command_that_is_named_goes_on_and_sets_the_damaged_one_aside(run_dir: Path) -> None:
    flip(run_dir / "checkpoints/step_3/model.safetensors")
    flip(run_dir / "checkpoints/step_2/model.safetensors")
    damaged = (run_dir / "checkpoints/step_3/model.safetensors").read_bytes()
    refused = CliRunner().invoke(app, ["resume", str(run_dir)])
    assert refused.exit_code == 2
    assert "model.safetensors: its content has changed" in refused.stderr
    [command] = [line for line in refused.stderr.splitlines() if "penstock resume" in line]
    words = command.partition("penstock ")[2].split()
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output

    folder = run_dir / "checkpoints"
    kept = ["aside_step_2", "aside_step_3", "step_1", "step_2", "step_3"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert (folder / "aside_step_3/model.safetensors").read_bytes() == damaged
    assert not damage(folder / "step_3", RunIdentity.read(run_dir).run_id, 3)
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert set(ends(run_dir).values()) == {1}
    [event] = [line for line in lines(run_dir / "events.jsonl") if line["event"] == "checkpoints_set_aside"]
    assert event["folders"] == ["step_3", "step_2"]

    penstock.resume(run_dir, checkpoint="step_2")
    assert (folder / "aside_step_3.1/penstock.json").is_file()
    assert not damage(folder / "step_3", RunIdentity.read(run_dir).run_id, 3)


def test_a_half_deleted_folder_is_set_aside_and_blocks_nothing(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    for name in ("step_3", "step_1"):
        (folder / name / SEAL).unlink()
    (folder / "step_9").mkdir()
    assert penstock.resume(run_dir).summary["steps"] == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "aside_step_1",
        "aside_step_3",
        "aside_step_9",
        "step_2",
        "step_3",
    ]
    assert not damage(folder / "step_3", RunIdentity.read(run_dir).run_id, 3)


def test_a_checkpoint_that_is_not_there_is_named(run_dir: Path) -> None:
    with pytest.raises(SetupError, match=r"--checkpoint: there is no 'step_7' in .*; it has step_1, step_2, step_3"):
        penstock.resume(run_dir, checkpoint="step_7")


def test_a_value_that_came_later_leaves_the_seal_whole(run_dir: Path) -> None:
    """The evaluation at the end belongs to the last checkpoint, which is there by then."""
    penstock.resume(run_dir, ["eval.at_end=true", "training.max_steps=4"])
    step = run_dir / "checkpoints/step_4"
    assert Seal.read(step).value is not None
    assert not damage(step, RunIdentity.read(run_dir).run_id, 4)


def test_a_seal_that_a_kill_left_half_written_is_no_damage(run_dir: Path) -> None:
    (run_dir / "checkpoints/step_3" / f".{SEAL}").write_text("{")
    assert not damage(run_dir / "checkpoints/step_3", RunIdentity.read(run_dir).run_id, 3)


def test_a_moved_run_is_still_the_same_run(run_dir: Path, tmp_path: Path) -> None:
    moved = run_dir.rename(tmp_path / "moved")
    assert penstock.resume(moved, ["training.max_steps=4"]).summary["steps"] == 4


def test_the_digest_of_a_large_file_is_made_of_its_blocks_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 1000
    monkeypatch.setattr("penstock.run.file_digests.BLOCK_BYTES", block)
    content = random.Random(0).randbytes(3 * block + 7)
    others = {
        "first byte": b"x" + content[1:],
        "last byte": content[:-1] + b"x",
        "swapped blocks": content[block : 2 * block] + content[:block] + content[2 * block :],
        "a block less": content[block:],
        "cut": content[:-1],
        "nothing": b"",
    }
    for name, changed in {"whole": content, "again": content, **others}.items():
        (tmp_path / name).write_bytes(changed)
    digests = file_digests(tmp_path, ["whole", "again", *others])
    assert digests["whole"] == digests["again"]
    assert len(set(digests.values())) == 1 + len(others)

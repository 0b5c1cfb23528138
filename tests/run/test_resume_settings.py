"""Settings of a resumed run are compared with those in its checkpoint, key by key."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import penstock
from penstock.config.models import RunConfig
from penstock.config.reading.keys import KeySpec, all_keys
from penstock.config.reading.loading import load_config
from penstock.errors import ConfigError
from penstock.run.checkpoint_folders import checkpoints
from penstock.run.resume_rules import FIXED, FREE, Change, changes, shown
from tests.run.conftest import ConfigMaker, run_config
from tests.run.test_resume import ends, lines

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run of three steps; tests that change it work on a copy."""
    settings = {"eval.at_start": False, "eval.at_end": False}
    return penstock.train(run_config(tmp_path_factory.mktemp("finished") / "run", model_folder, **settings)).run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def edit(run_dir: Path, key: str, value: Any) -> None:
    """Change a setting in the run's own file."""
    path = run_dir / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    section = settings
    for name in key.split(".")[:-1]:
        section = section[name]
    section[key.split(".")[-1]] = value
    path.write_text(yaml.safe_dump(settings))


def leaves() -> set[str]:
    """Every key that holds a value, of all kinds of a choice."""
    keys = set(all_keys(RunConfig))
    return {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}


def test_every_setting_may_change_or_may_not() -> None:
    hint = "decide in penstock/run/resume_rules.py whether a checkpoint depends on it"
    assert leaves() - FIXED.keys() - FREE == set(), hint
    assert (FIXED.keys() | FREE) - leaves() == set()
    assert FIXED.keys() & FREE == set()
    assert KeySpec.of(RunConfig.model_fields["staleness"].annotation).is_choice, "all kinds were looked at"


def test_the_page_says_what_may_not_change() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("## What may change between two processes of a run") :]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", table, flags=re.MULTILINE)
    assert dict(rows) == FIXED


@pytest.mark.long
def test_the_same_model_may_be_named_in_another_way(run_dir: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model_folder)
    detour = model_folder / ".." / model_folder.name
    for steps, path in ((4, detour), (5, tmp_path / "link")):
        result = penstock.resume(run_dir, [f"model.path={path}", f"training.max_steps={steps}"])
        assert result.summary["steps"] == steps
    shutil.copytree(model_folder, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"model\.path: is now .*copy,"):
        penstock.resume(run_dir, [f"model.path={tmp_path / 'copy'}"])


def test_a_run_with_a_relative_model_goes_on_from_another_folder(
    make_config: ConfigMaker, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(model_folder.parent)
    settings = {"model.path": f"./{model_folder.name}", "eval.at_start": False, "eval.at_end": False}
    run_dir = penstock.train(make_config(**settings)).run_dir
    assert load_config(run_dir / "config.yaml").model.path == str(model_folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert penstock.resume(run_dir, ["training.max_steps=4"]).summary["steps"] == 4


OVERRIDES = {
    "seed": "seed=5",
    "model.dtype": "model.dtype=float64",
    "model.lora": "model.lora={rank: 4}",
    "data.train_size": "data.train_size=23",
    "data.shuffle": "data.shuffle=false",
    "rollout.group_size": "rollout.group_size=4",
    "rollout.sampling.temperature": "rollout.sampling.temperature=0.9",
    "training.prompt_groups_per_step": "training.prompt_groups_per_step=2",
    "staleness.policy": "staleness={policy: windowed, max_staleness: 1}",
}


@pytest.mark.parametrize("key", OVERRIDES)
def test_what_the_checkpoint_depends_on_is_refused_by_its_key(finished: Path, key: str) -> None:
    before = (finished / "metrics.jsonl").read_bytes(), (finished / "config.yaml").read_bytes()
    with pytest.raises(
        ConfigError, match=rf"{key}: is now .*, but .* in checkpoint step_3, which depends on it; set it back"
    ) as caught:
        penstock.resume(finished, [OVERRIDES[key]])
    assert len(caught.value.problems) == 1
    assert before == ((finished / "metrics.jsonl").read_bytes(), (finished / "config.yaml").read_bytes())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("training.prompt_groups_per_step", 2, "is now 2, but 4 in checkpoint step_3"),
        ("model.path", "elsewhere", "is now elsewhere, but /"),
        ("rollout.environment.kind", "reasoning_gym:basic_arithmetic", "is now reasoning_gym:basic_arithmetic"),
    ],
)
def test_an_edited_file_is_no_way_round(run_dir: Path, key: str, value: object, expected: str) -> None:
    edit(run_dir, key, value)
    with pytest.raises(ConfigError, match=f"{key}: {expected}"):
        penstock.resume(run_dir, ["training.max_steps=4"])


def test_an_edited_staleness_bound_is_refused(make_config: ConfigMaker) -> None:
    quick = {"eval.at_start": False, "eval.at_end": False, "algorithm.correction": {"kind": "tis"}}
    config = make_config(**quick, staleness={"policy": "windowed", "max_staleness": 1})
    run_dir = penstock.train(config).run_dir
    edit(run_dir, "staleness.max_staleness", 3)
    with pytest.raises(ConfigError, match=r"staleness\.max_staleness: is now 3, but 1 in checkpoint step_3"):
        penstock.resume(run_dir)


def test_all_that_is_wrong_is_said_at_once_and_what_is_set_back_is_fine(run_dir: Path) -> None:
    edit(run_dir, "seed", 5)
    edit(run_dir, "rollout.group_size", 4)
    with pytest.raises(ConfigError) as caught:
        penstock.resume(run_dir, ["training.max_steps=4", "training.optimizer.lr=0.5"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["seed", "rollout.group_size"]
    result = penstock.resume(run_dir, ["training.max_steps=4", "seed=0", "rollout.group_size=3"])
    assert result.summary["steps"] == 4
    assert load_config(run_dir / "config.yaml").seed == 0


def test_what_may_change_is_reported_and_compared_with_afterwards(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed() -> list[list[str]]:
        return [line["changes"] for line in lines(run_dir / "events.jsonl") if line["event"] == "settings_changed"]

    edit(run_dir, "training.optimizer.lr", 0.002)
    penstock.resume(run_dir, ["training.max_steps=4", "observe.console=plain"])
    expected = ["training.optimizer.lr 0.001 -> 0.002", "training.max_steps 3 -> 4", "observe.console off -> plain"]
    assert changed() == [expected]
    shown_once = capsys.readouterr().out
    assert f"settings changed since step 3: {', '.join(expected)}" in " ".join(shown_once.split())
    assert "settings_changed" not in shown_once
    penstock.resume(run_dir)
    assert changed() == [expected], "the new checkpoint has the new settings"
    saved = load_config(run_dir / "checkpoints/step_4/controller/config.yaml")
    assert (saved.training.optimizer.lr, saved.training.max_steps) == (0.002, 4)


def test_a_run_with_ready_groups_goes_on_with_everything_else_changed(make_config: ConfigMaker) -> None:
    """Groups that were generated and counted under the old settings are trained under the new ones."""
    config = make_config(
        **{
            "staleness": {"policy": "windowed", "max_staleness": 6},
            "algorithm.correction": {"kind": "tis"},
            "training.max_steps": None,
            "checkpoint.every_steps": 1,
            "checkpoint.keep_latest": 100,
            "eval.at_start": False,
            "eval.at_end": False,
        }
    )
    run_dir = penstock.train(config).run_dir
    with_ready = [
        path.name
        for path in checkpoints(run_dir / "checkpoints")
        if json.loads((path / "controller/state.json").read_text())["ready"]
    ]
    changed = [
        "training.minibatches_per_step=2",
        "training.min_groups_per_chunk=4",
        "algorithm.advantage={kind: batch_whitened}",
        "algorithm.kl={coefficient: 0.01}",
        "rollout.failure.on_drop=shrink",
        "rollout.max_inflight_groups=3",
        "rollout.sampling.max_new_tokens=3",
        "buffer.max_buffered_groups=24",
        "weight_sync.mode=abort_stale",
        "training.batching=packed",
        "training.optimizer.schedule=linear",
        "training.max_steps=5",
        "data.epochs=2",
    ]
    result = penstock.resume(run_dir, changed, checkpoint=with_ready[0])
    assert result.summary["steps"] == 5
    assert set(ends(run_dir).values()) == {1}


@pytest.mark.long
def test_a_run_without_a_checkpoint_begins_anew_with_any_settings(make_config: ConfigMaker) -> None:
    quick = {"eval.at_start": False, "eval.at_end": False, "checkpoint.at_end": False}
    run_dir = penstock.train(make_config(**quick)).run_dir
    assert penstock.resume(run_dir, ["training.prompt_groups_per_step=2"]).summary["steps"] == 3


def test_changes_are_found_in_every_kind_of_place(model_folder: Path) -> None:
    base = run_config(Path("a"), model_folder)
    other = run_config(
        Path("b"),
        model_folder,
        **{
            "staleness": {"policy": "in_order", "lookahead": 2},
            "model.lora": {"rank": 4},
            "observe.wandb": {"project": "x"},
            "rollout.environment.args": {"min_terms": 3},
            "eval.max_new_tokens": 5,
        },
    )
    found = {change.key: change for change in changes(base, other)}
    assert {key: change.is_fixed for key, change in found.items()} == {
        "model.lora": True,
        "rollout.environment.args": False,
        "staleness.policy": True,
        "eval.max_new_tokens": False,
        "observe.wandb": False,
    }
    assert str(found["staleness.policy"]) == "staleness.policy on_policy -> in_order"
    assert str(found["eval.max_new_tokens"]) == "eval.max_new_tokens nothing -> 5"
    assert changes(base, base) == []
    assert all(Change(key, 1, 2).is_fixed for key in FIXED)
    assert not any(Change(key, 1, 2).is_fixed for key in FREE)
    assert len(shown("x" * 1000)) == 80

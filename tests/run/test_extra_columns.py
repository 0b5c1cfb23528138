"""The page's environment with columns of its own, from its page to a trained model, and wherever its columns go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.controller.bookkeeping.snapshot import ControllerSnapshot
from penstock.controller.bookkeeping.state_keeper import StateKeeper
from penstock.data_plane.archive import load_rows
from penstock.errors import ConfigError, SetupError
from penstock.observe.report.build import write_report
from penstock.rollout.recorded import FOLDER, Recording
from penstock.run.checks import check_config
from penstock.run.train import resume
from tests.rollout.test_environment_page import HEADING, PAGE, digits
from tests.run.conftest import ConfigMaker
from tests.run.test_resume import cut_back
from tests.run.test_train import lines, steps
from tests.run.verifying import run_verify
from tests.support.tiny_models import char_tokenizer
from tests.test_docs import blocks

COLUMNS = {"turn", "board", "distance", "numbers", "guesses"}
ADAPTERS: dict[str, dict[str, Any]] = {"memory": {}, "shm": {"data_plane": {"adapter": "shm", "capacity_gb": 0.05}}}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of the page's example; its code is saved where Python finds it."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(HEADING) :].split("\n## ", 2)[0]
    found = {info: [block.code for block in blocks(section) if block.info == info] for info in ("python", "yaml")}
    (tmp_path / "my_environments.py").write_text("\n\n".join(found["python"]), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_environments", raising=False)
    settings: dict[str, Any] = parse_yaml(found["yaml"][-1])
    return settings


def configured(make_config: ConfigMaker, page: dict[str, Any], **changes: Any) -> RunConfig:
    settings = {
        "rollout.environment": page["rollout"]["environment"],
        "algorithm": page["algorithm"],
        "data": {"train_size": 12, "eval_size": 4},
        # A random model seldom stops: a digit ends its turn.
        "rollout.sampling": {"max_new_tokens": 24, "stop_token_ids": digits(char_tokenizer())},
        "rollout.engine": {"max_num_seqs": 12, "max_model_len": 192},
        "training.max_steps": 2,
    }
    return make_config(**settings | changes)


def test_the_example_of_the_page_trains_and_its_numbers_are_everywhere(
    make_config: ConfigMaker, page: dict[str, Any]
) -> None:
    config = configured(make_config, page)
    check_config(config)
    run_dir = penstock.train(config).run_dir
    for line in steps(run_dir):
        assert line["train/grad_norm"] > 0
        assert 0.5 < line["train/loss/discount"] <= 1, "the loss has each token's turn"
        assert line["rollout/scored/distance"] >= 0
        numbers = line["rollout/scored/numbers"]
        assert numbers == int(numbers) > 0, "the sum over the samples of a step"
        assert line["rollout/scored/turns"] >= 1
    evals = [line for line in lines(run_dir / "metrics.jsonl") if "eval/reward_mean" in line]
    assert all(line["eval/scored/numbers"] == int(line["eval/scored/numbers"]) for line in evals)
    assert all("numbers" in sample["metrics"] for sample in lines(run_dir / "samples.jsonl"))
    report = write_report(run_dir).path.read_text(encoding="utf-8")
    assert "What the environment measures" in report
    assert "scored/distance" in report


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["turn", "distanc"], "the environment scored has no column 'distanc'; did you mean distance"),
        (["pictures"], "has no column 'pictures'; it declares turn, board, distance, numbers, guesses"),
        (["guesses"], "'guesses' of the environment scored holds objects; a loss takes tensors"),
        (["reward"], "the environment scored has no column 'reward'"),
    ],
)
def test_a_loss_that_asks_for_a_column_nobody_has_is_refused(
    make_config: ConfigMaker, page: dict[str, Any], columns: list[str], message: str
) -> None:
    page["algorithm"]["loss"]["columns"] = columns
    config = configured(make_config, page)
    with pytest.raises(ConfigError, match=f"algorithm.loss.columns: .*{message}"):
        check_config(config)


def test_an_environment_without_columns_has_none_for_a_loss(make_config: ConfigMaker) -> None:
    loss = {"kind": "custom", "import_path": "tests.support.custom_algorithms:clipped", "columns": ["turn"]}
    with pytest.raises(ConfigError, match=r"algorithm.loss.columns: .* has no column 'turn'; it declares none"):
        check_config(make_config(**{"algorithm.loss": loss, "rollout.environment": {"kind": "calculator"}}))


@pytest.mark.long
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_replay_of_the_recording_has_the_same_losses_and_numbers(
    make_config: ConfigMaker, page: dict[str, Any], tmp_path: Path, adapter: str
) -> None:
    same = {
        "deterministic": True,
        "staleness": {"policy": "in_order", "lookahead": 0},
        "weight_sync.mode": "drain",
        "eval": {"at_start": False, "at_end": False},
        **ADAPTERS[adapter],
    }
    recorded = configured(make_config, page, **same, **{"rollout.record": True, "run_dir": str(tmp_path / "first")})
    first = penstock.train(recorded).run_dir
    recording = Recording.read(first)
    assert {column.name for column in recording.info.columns} == COLUMNS
    group = recording.groups[0]
    assert load_rows(first / FOLDER / group.folder_name).columns.keys() >= COLUMNS
    replays = {"rollout.replay_from": str(first), "run_dir": str(tmp_path / "second")}
    second = penstock.train(configured(make_config, page, **same, **replays)).run_dir

    def figures(run_dir: Path) -> list[list[float]]:
        keys = ("train/loss", "train/grad_norm", "rollout/scored/numbers", "rollout/scored/distance")
        return [[line[key] for key in keys] for line in steps(run_dir)]

    assert len(figures(first)) == 2
    assert figures(first) == figures(second)
    page["algorithm"]["loss"]["columns"] = ["turn", "distance", "pictures"]
    refused = configured(make_config, page, **same, **replays | {"run_dir": str(tmp_path / "third")})
    with pytest.raises(ConfigError, match=r"algorithm.loss.columns: the recording in .* has no column 'pictures'"):
        check_config(refused)


@pytest.fixture
def ready_after_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint after the first step waits until a group is ready, however slow the machine is."""
    take = StateKeeper.take

    async def take_with_ready(self: StateKeeper) -> ControllerSnapshot:
        if self._parts.buffer.clock.step == 1:
            await self._parts.buffer.wait_selectable(1)
        return await take(self)

    monkeypatch.setattr(StateKeeper, "take", take_with_ready)


@pytest.mark.long
@pytest.mark.usefixtures("ready_after_one_step")
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_ready_groups_of_a_checkpoint_are_trained_with_their_columns(
    make_config: ConfigMaker, page: dict[str, Any], tmp_path: Path, adapter: str
) -> None:
    settings = {
        "data": {"train_size": 64, "eval_size": 4},
        "staleness": {"policy": "windowed", "max_staleness": 3},
        "checkpoint": {"every_steps": 1, "keep_latest": 100},
        "training.max_steps": 3,
        "eval": {"at_start": False, "at_end": False},
        **ADAPTERS[adapter],
    }
    run_dir = penstock.train(configured(make_config, page, **settings)).run_dir
    assert load_rows(run_dir / "checkpoints/step_1/controller/rows").columns.keys() >= COLUMNS
    cut_back(run_dir, 1)
    module = tmp_path / "my_environments.py"
    source = module.read_text(encoding="utf-8")
    fewer = source.replace('        ExtraColumn("guesses", "object"),\n', "").replace(
        '            "guesses": guesses,\n', ""
    )
    module.write_text(fewer, encoding="utf-8")
    forget_module()
    with pytest.raises(SetupError, match=r"extra_columns are board, distance, numbers, turn, but .* guesses"):
        resume(run_dir)
    module.write_text(source, encoding="utf-8")
    forget_module()
    resume(run_dir)
    assert [line["step"] for line in steps(run_dir)] == [1, 2, 3]
    assert all(line["rollout/scored/numbers"] > 0 for line in steps(run_dir))


def forget_module() -> None:
    """The next run imports the file as it is then."""
    import importlib
    import sys

    sys.modules.pop("my_environments", None)
    importlib.invalidate_caches()


@pytest.mark.long
def test_verify_gives_a_loss_its_columns(make_config: ConfigMaker, page: dict[str, Any], tmp_path: Path) -> None:
    row = run_verify(configured(make_config, page), tmp_path).checks["custom_loss"]
    assert row["status"] == "pass"
    assert row["figures"]["responses"] > 1

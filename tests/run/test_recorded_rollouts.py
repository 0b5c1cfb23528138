"""Rollouts recorded by one run and trained on by another, which has no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.controller.pumps.open_step import OpenStep
from penstock.controller.pumps.train import TrainPump
from penstock.data_plane import archive
from penstock.errors import ConfigError, RecordError, SetupError
from penstock.rollout.recorded import FOLDER, Recording
from penstock.run import build, build_engines
from penstock.run.evaluate import evaluate
from penstock.run.train import resume
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines, steps
from tests.support.tiny_models import bpe_tokenizer, save_tiny_model

GROUPS = 24
SAMPLERS: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "windowed": {"staleness": {"policy": "windowed", "max_staleness": 1}, "weight_sync.mode": "abort_stale"},
    "over_sampling": {"staleness": {"policy": "windowed", "max_staleness": 2, "over_sampling": True}},
    "in_order": {"staleness": {"policy": "in_order", "lookahead": 1}, "weight_sync.mode": "drain"},
    "weight_fifo": {"staleness": {"policy": "weight_fifo", "max_staleness": 1, "lookahead": 1}},
    "ready_first": {"staleness": {"policy": "ready_first"}, "algorithm.correction": {"kind": "tis"}},
}
DETERMINISTIC = {
    "deterministic": True,
    "staleness": {"policy": "in_order", "lookahead": 0},
    "weight_sync.mode": "drain",
    "training.min_groups_per_chunk": 2,
}
FIGURES = ("loss", "grad_norm", "entropy", "mismatch_kl", "reward_mean", "token_lag_mean", "token_lag_max")

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def make_run(make_config: ConfigMaker, tmp_path: Path) -> MakeRun:
    """A run of its own folder over 24 prompts whose rewards have spread; no evaluation."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": ""}) + "\n" for n in range(GROUPS)))

    def make(name: str, **changes: Any) -> RunConfig:
        usual = {
            "run_dir": str(tmp_path / name),
            "data": {"train_path": str(data)},
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:length"},
            "eval": {"at_start": False, "at_end": False},
            "training.max_steps": None,
        }
        return make_config(**usual | changes)

    return make


def record(make_run: MakeRun, name: str = "recorded", **changes: Any) -> Path:
    config = make_run(
        name, **{"training.backend": "none", "rollout.record": True, "checkpoint.at_end": False} | changes
    )
    return penstock.train(config).run_dir


def figures(run_dir: Path) -> list[list[float]]:
    return [[line[f"train/{name}"] for name in FIGURES] for line in steps(run_dir)]


def ends(run_dir: Path) -> dict[tuple[int, str], str]:
    """What became of each prompt; each has one end."""
    found = lines(run_dir / "ledger.jsonl")
    by_key = {(line["epoch"], line["prompt_id"]): line["end"] for line in found}
    assert len(by_key) == len(found)
    return by_key


def events(run_dir: Path) -> set[str]:
    return {line["event"] for line in lines(run_dir / "events.jsonl")}


@pytest.mark.parametrize("sampler", ["on_policy", "in_order"])
def test_nothing_is_generated_for_steps_that_will_not_be(
    make_run: MakeRun, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the work at the end of the last step takes: its weights are published by then."""
    close = TrainPump._close

    async def close_slowly(pump: TrainPump, step: OpenStep, started: float) -> None:
        await close(pump, step, started)
        await asyncio.sleep(0.3)

    monkeypatch.setattr(TrainPump, "_close", close_slowly)
    config = make_run("run", **SAMPLERS[sampler] | {"rollout.record": True, "training.max_steps": 2})
    groups = Recording.read(penstock.train(config).run_dir).groups
    assert len(groups) == 2 * config.training.prompt_groups_per_step


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_recording_becomes_training_data_in_every_kind_of_sampler(
    make_run: MakeRun, sampler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = record(make_run, **SAMPLERS[sampler])
    groups = Recording.read(source).groups
    assert sorted(group.position for group in groups) == list(range(GROUPS))
    recorded_steps = lines(source / "metrics.jsonl")
    assert not any("train/loss" in line for line in recorded_steps)
    assert {line["train/version"] for line in recorded_steps} == {0.0}
    assert all(line["train/reward_mean"] > 0 for line in recorded_steps)
    assert "weights_published" not in events(source)

    monkeypatch.setattr(build_engines, "_ENGINES", {})
    monkeypatch.setattr(build, "make_environment", None)
    replay = {"rollout.replay_from": str(source), "observe.console": "plain"}
    result = penstock.train(make_run("replay", **SAMPLERS[sampler] | replay))
    assert f"replaying {GROUPS} recorded groups of 1 epoch from {source}" in capsys.readouterr().out
    assert ends(result.run_dir) == {group.key: "trained" for group in groups}
    assert [line["train/version"] for line in steps(result.run_dir)] == [1, 2, 3, 4, 5, 6]
    assert [line["train/token_lag_max"] for line in steps(result.run_dir)] == [0, 1, 2, 3, 4, 5]
    assert result.summary["rollout/tokens_generated"] == 0
    assert events(result.run_dir) <= {
        "run_started",
        "warning",
        "weights_published",
        "checkpoint_proved",
        "checkpoint_saved",
        "run_ended",
        "group_evicted",
    }


def test_a_run_that_trains_records_as_well_and_its_replay_is_bit_equal(make_run: MakeRun) -> None:
    source = penstock.train(make_run("source", **DETERMINISTIC, **{"rollout.record": True})).run_dir
    replay = DETERMINISTIC | {"rollout.replay_from": str(source)}
    wanted = figures(source)
    assert len(wanted) == 6
    assert sum(grad_norm > 0 for _, grad_norm, *_ in wanted) >= 3
    assert figures(penstock.train(make_run("first", **replay)).run_dir) == wanted
    assert figures(penstock.train(make_run("second", **replay)).run_dir) == wanted


def test_the_first_step_on_rollouts_only_is_that_of_the_run_itself(make_run: MakeRun) -> None:
    itself = penstock.train(make_run("itself", **DETERMINISTIC)).run_dir
    source = record(make_run, **DETERMINISTIC)
    replay = penstock.train(make_run("replay", **DETERMINISTIC, **{"rollout.replay_from": str(source)})).run_dir
    first, *later = zip(figures(itself), figures(replay), strict=True)
    assert first[0] == first[1]
    assert all(left != right for left, right in later)


def test_several_epochs_are_replayed_as_they_were_dispatched(make_run: MakeRun) -> None:
    source = record(make_run, **{"data.epochs": 2})
    keys = [group.key for group in Recording.read(source).groups]
    assert [epoch for epoch, _ in keys] == [0] * GROUPS + [1] * GROUPS
    result = penstock.train(make_run("replay", **DETERMINISTIC, **{"rollout.replay_from": str(source)}))
    assert list(ends(result.run_dir)) == keys


@pytest.mark.parametrize("what", ["recording", pytest.param("replay", marks=pytest.mark.long)])
def test_a_recording_and_a_replay_can_be_resumed(make_run: MakeRun, what: str) -> None:
    source = record(make_run, **DETERMINISTIC)
    changes = DETERMINISTIC | {"checkpoint.at_end": True}
    if what == "recording":
        changes |= {"training.backend": "none", "rollout.record": True}
    else:
        changes |= {"rollout.replay_from": str(source)}
    whole = penstock.train(make_run("whole", **changes)).run_dir
    part = penstock.train(make_run("part", **changes, **{"training.max_steps": 2})).run_dir
    result = resume(part, ["training.max_steps=6"])
    assert result.summary["steps"] == 6
    assert ends(part) == ends(whole)
    if what == "recording":
        assert [g.model_dump() for g in Recording.read(part).groups] == [
            g.model_dump() for g in Recording.read(whole).groups
        ]
    else:
        assert figures(part) == figures(whole)


def test_a_trained_replay_can_be_evaluated_with_an_engine(make_run: MakeRun, tmp_path: Path) -> None:
    source = record(make_run)
    config = make_run(
        "replay", **{"rollout.replay_from": str(source), "data.eval_path": str(tmp_path / "prompts.jsonl")}
    )
    report = evaluate(config, penstock.train(config).run_dir)
    assert report["eval/reward_mean"] > 0


def test_a_damaged_group_is_dropped_by_name_where_the_budget_allows(make_run: MakeRun) -> None:
    source = record(make_run)
    group = Recording.read(source).groups[5]
    (source / FOLDER / group.folder_name / "rows.json").write_text("{")
    replay = {"rollout.replay_from": str(source)}
    with pytest.raises(penstock.PenstockError, match="max_dropped_prompts = 0") as caught:
        penstock.train(make_run("strict", **replay))
    assert group.folder_name in str(caught.value)
    failure = {"backoff_seconds": 0, "max_dropped_prompts": 1}
    result = penstock.train(make_run("lenient", **replay, **{"rollout.failure": failure}))
    assert ends(result.run_dir)[group.key] == "dropped"
    assert sorted(ends(result.run_dir).values()).count("trained") == GROUPS - 1


def test_a_full_disk_ends_the_recording_whatever_the_drop_budget(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def until_full(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        save_rows(*arguments)

    save_rows = archive.save_rows
    monkeypatch.setattr(archive, "save_rows", until_full)
    failure = {"backoff_seconds": 0, "max_dropped_prompts": GROUPS}
    with pytest.raises(RecordError, match="No space left on device"):
        record(make_run, **{"rollout.failure": failure})
    assert len(Recording.read(Path(make_run("recorded").run_dir)).groups) == 3


def test_a_recording_of_other_settings_is_refused_with_the_keys(make_run: MakeRun) -> None:
    replay = {"rollout.replay_from": str(record(make_run)), "rollout.group_size": 4}
    with pytest.raises(ConfigError) as caught:
        penstock.train(make_run("replay", **replay, **{"rollout.sampling": {"temperature": 0.5, "max_new_tokens": 6}}))
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "rollout.group_size",
        "rollout.sampling.temperature",
    ]
    assert not Path(make_run("replay").run_dir).exists()


def test_a_recording_that_does_not_name_min_p_was_made_without_it(make_run: MakeRun) -> None:
    recording = record(make_run)
    info = recording / "rollouts" / "recording.json"
    named = json.loads(info.read_text())
    assert named["settings"].pop("rollout.sampling.min_p") == 0.0
    info.write_text(json.dumps(named))
    penstock.train(make_run("replay", **{"rollout.replay_from": str(recording)}))
    other = {"rollout.sampling": {"min_p": 0.1, "max_new_tokens": 6}, "algorithm.correction": {"kind": "tis"}}
    with pytest.raises(ConfigError, match=r"rollout.sampling.min_p: is 0.1, but .* recorded with 0.0"):
        penstock.train(make_run("other", **{"rollout.replay_from": str(recording)}, **other))


def test_a_model_with_other_tokens_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", tokenizer=bpe_tokenizer())
    changes = {"rollout.replay_from": str(record(make_run)), "model.path": str(other)}
    with pytest.raises(ConfigError, match=r"model.path: .* another tokenizer"):
        penstock.train(make_run("replay", **changes))


def test_a_run_without_recorded_rollouts_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="holds no recorded rollouts"):
        penstock.train(make_run("replay", **{"rollout.replay_from": str(tmp_path)}))


def test_rollouts_of_a_run_that_failed_before_its_first_step_are_neither_taken_over_nor_lost(make_run: MakeRun) -> None:
    stale = Path(make_run("recorded").run_dir) / FOLDER / "0-stale-0"
    stale.mkdir(parents=True)
    with pytest.raises(SetupError, match="has rollouts, which a run would overwrite"):
        record(make_run)
    assert stale.exists()

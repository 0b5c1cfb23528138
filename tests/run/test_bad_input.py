"""Wrong input: a clear word about what to do, or a run that copes; never a hang, never a row that should not be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.reading.loading import dump_config
from penstock.errors import ConfigError, PenstockError, SetupError
from penstock.run.checks import check_config
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines, steps


def dataset(folder: Path, prompts: list[str]) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
    return str(file)


def function_run(make_config: ConfigMaker, path: str, reward: str, **changes: Any) -> Any:
    return make_config(
        **{
            "data": {"train_path": path},
            "rollout.environment": {"kind": "function", "import_path": f"tests.support.rewards:{reward}"},
            "training.max_steps": 2,
            **changes,
        }
    )


def test_an_empty_dataset(make_config: ConfigMaker, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"prompts\.jsonl.*is empty"):
        penstock.train(function_run(make_config, dataset(tmp_path, []), "length"))


@pytest.mark.parametrize(
    ("reward", "word", "reason"),
    [("raising", "fail", "ValueError"), ("not_a_number", "nan", "nan"), ("hanging", "hang", "timeout_seconds")],
)
def test_an_environment_that_fails_costs_its_prompt_only(
    make_config: ConfigMaker, tmp_path: Path, reward: str, word: str, reason: str
) -> None:
    path = dataset(tmp_path, ["fine", word, *["fine"] * 10])
    config = function_run(
        make_config,
        path,
        reward,
        **{
            "rollout.failure.max_dropped_prompts": 1,
            "rollout.environment.timeout_seconds": 0.2,
            "training.max_steps": None,
        },
    )
    result = penstock.train(config)
    [dropped] = [line for line in lines(result.run_dir / "events.jsonl") if line["event"] == "prompt_dropped"]
    assert dropped["prompt_id"] == "2"
    assert reason in dropped["reason"]
    assert result.summary["steps"] == 3


def test_groups_in_which_every_response_is_truncated_train_like_others(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    path = dataset(tmp_path, ["abc"] * 8)
    result = penstock.train(function_run(make_config, path, "length", **{"rollout.sampling.max_new_tokens": 1}))
    assert all(line["rollout/truncation_rate"] > 0.9 for line in steps(result.run_dir))
    assert result.summary["steps"] == 2


def test_no_reward_spread_in_any_group_changes_nothing_and_breaks_nothing(
    make_config: ConfigMaker, tmp_path: Path
) -> None:
    path = dataset(tmp_path, ["abc"] * 8)
    result = penstock.train(function_run(make_config, path, "constant"))
    for line in steps(result.run_dir):
        assert line["train/grad_norm"] == 0
        assert line["train/groups_without_spread"] == 4
    assert result.summary["steps"] == 2


def test_a_model_folder_that_is_not_one(make_config: ConfigMaker, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, match in ((tmp_path / "empty", "without config.json"), (tmp_path / "missing", "is not a folder")):
        with pytest.raises(SetupError, match=match):
            penstock.train(make_config(**{"model.path": str(path)}))
    with pytest.raises(SetupError, match=r"model\.download=true"):
        penstock.train(make_config(**{"model.path": "nobody/nothing"}))


def test_a_failed_start_leaves_the_folder_usable(make_config: ConfigMaker) -> None:
    with pytest.raises(SetupError):
        penstock.train(make_config(**{"model.path": "nobody/nothing"}))
    assert penstock.train(make_config()).summary["steps"] == 3


def test_a_buffer_too_small_for_the_sampler_says_which_number_to_change(make_config: ConfigMaker) -> None:
    config = make_config(**{"staleness": {"policy": "in_order", "lookahead": 3}, "buffer.max_buffered_groups": 4})
    with pytest.raises(ConfigError, match=r"buffer\.max_buffered_groups: 4.*at least 13"):
        penstock.train(config)


def test_two_runs_at_once_in_one_directory(make_config: ConfigMaker) -> None:
    from penstock.run.directory import RunDirectory

    config = make_config()
    first = RunDirectory(config.run_dir)
    with pytest.raises(SetupError, match="in use by another run"):
        penstock.train(config)
    first.close()
    assert penstock.train(config).summary["steps"] == 3


def test_a_run_that_fails_says_so_in_its_summary(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = function_run(make_config, dataset(tmp_path, ["fail"] * 4), "raising")
    with pytest.raises(PenstockError):
        penstock.train(config)
    summary = json.loads((Path(config.run_dir) / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "error"
    assert summary["steps"] == 0
    assert "this prompt has no reward" in summary["error"]


@pytest.mark.long
def test_a_raising_reward_leaves_nothing_on_stderr_but_the_message(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = function_run(make_config, dataset(tmp_path, ["fail"] * 8), "raising", **{"observe.console": "plain"})
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "train", str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "this prompt has no reward" in done.stderr
    assert "Traceback" not in done.stderr
    assert "never retrieved" not in done.stderr


def test_more_keys_and_values_than_memory_holds(make_config: ConfigMaker) -> None:
    with pytest.raises(SetupError, match=r"rollout\.engine: max_num_seqs = 10000000000 slots.*GiB"):
        penstock.train(make_config(**{"rollout.engine.max_num_seqs": 10_000_000_000}))


def test_steps_larger_than_the_data_with_nothing_to_train(make_config: ConfigMaker) -> None:
    config = make_config(
        **{"data.partial_step": "drop", "training.prompt_groups_per_step": 25, "buffer.max_buffered_groups": 50}
    )
    with pytest.raises(ConfigError, match=r"data\.partial_step: drop leaves nothing"):
        penstock.train(config)


def test_a_chat_template_that_the_tokenizer_does_not_have(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template"):
        penstock.train(make_config(**{"data.chat_template": True}))


def test_a_stop_token_outside_the_vocabulary(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids: \[99999\]"):
        penstock.train(make_config(**{"rollout.sampling.stop_token_ids": [99_999]}))


def test_a_reward_function_that_cannot_be_called_that_way(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = function_run(
        make_config, dataset(tmp_path, ["a"]), "length", **{"rollout.environment.args": {"colour": "blue"}}
    )
    with pytest.raises(ConfigError, match=r"rollout\.environment\.args\.colour: .*has no parameter of this name"):
        check_config(config)


def test_config_check_finds_what_would_stop_a_run_at_its_start(make_config: ConfigMaker, tmp_path: Path) -> None:
    kind = "rollout.environment.kind"
    wrong: list[tuple[Any, str]] = [
        (make_config(**{kind: "reasoning_gym:chain_sums"}), "did you mean chain_sum"),
        (make_config(**{"rollout.environment.args": {"min_term": 2}}), r"args\.min_term: .*did you mean min_terms"),
        (make_config(**{"model.path": str(tmp_path)}), r"config\.json"),
        (function_run(make_config, str(tmp_path / "no.jsonl"), "length"), r"data\.train_path: .*does not exist"),
        (function_run(make_config, str(tmp_path), "length"), r"data\.train_path: .*is a folder"),
    ]
    for config, match in wrong:
        with pytest.raises((ConfigError, SetupError), match=match):
            check_config(config)

"""What is told before a run: everything at once, by `config check` and by `train` alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.config.reading.loading import dump_config, load_config
from penstock.errors import CannotStart, ConfigError
from penstock.rollout.environments.rewards import process_pool
from penstock.run.build import build_serving
from penstock.run.checks import check_config, find_problems
from penstock.run.directory import RunDirectory
from penstock.run.problems import Level, Problem
from penstock.weights.model_files import longest_context
from tests.run.checking import changed_model, errors, function_run, prompts, warnings
from tests.run.conftest import ConfigMaker
from tests.run.test_train import lines


def test_a_healthy_run_has_no_findings_and_nothing_is_left_behind(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = function_run(make_config, tmp_path)
    before = sorted(tmp_path.iterdir())
    assert find_problems(config).all == ()
    assert sorted(tmp_path.iterdir()) == before


def test_everything_is_told_at_once_a_run_in_the_folder_next_to_the_rest(
    make_config: ConfigMaker, tmp_path: Path, model_folder: Path
) -> None:
    config = function_run(
        make_config,
        tmp_path,
        **{
            "data": {"train_path": str(tmp_path / "none.jsonl"), "chat_template": True},
            "rollout.environment": {"kind": "function", "import_path": "tests.support.rewards:lenght"},
            "rollout.engine.max_model_len": 4096,
            "staleness": {"policy": "in_order", "lookahead": 3},
            "buffer.max_buffered_groups": 4,
            "observe.tensorboard": {"folder": str(model_folder / "config.json")},
        },
    )
    running = RunDirectory(config.run_dir)
    try:
        told = errors(config)
        with pytest.raises(CannotStart) as refused:
            penstock.train(config)
    finally:
        running.close()
    assert told.keys() == {
        "run_dir",
        "observe.tensorboard.folder",
        "buffer.max_buffered_groups",
        "rollout.engine.max_model_len",
        "data.chat_template",
        "rollout.environment.import_path",
        "data.train_path",
    }
    assert "in use by another run" in told["run_dir"]
    assert "did you mean length?" in told["rollout.environment.import_path"]
    assert refused.value.problems == [f"{key}: {reason}" for key, reason in told.items()]
    assert [line.partition(":")[0] for line in refused.value.warnings] == ["staleness.lookahead"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:record", "module 'no_such_module' cannot be imported"),
        ("tests.support.rewards:lenght", "has no callable 'lenght'; did you mean length?"),
        ("tests.support.rewards:length", None),
    ],
)
def test_the_function_for_events_of_the_data_plane(make_config: ConfigMaker, path: str, reason: str | None) -> None:
    told = errors(make_config(**{"data_plane.on_event": path, "rollout.environment": {"kind": "calculator"}}))
    assert told.keys() == ({"data_plane.on_event"} if reason else set())
    assert (reason or "") in told.get("data_plane.on_event", "")


def test_contradictions_between_settings_are_told_next_to_the_rest(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(function_run(make_config, tmp_path, **{"model.path": str(tmp_path / "nowhere")})))
    wrong = ["rollout.sampling.max_new_tokens=500", "weight_sync.mode=drain", "weight_sync.kv_cache=keep"]
    done = CliRunner().invoke(app, ["config", "check", str(path), "--json", *wrong])
    assert done.exit_code == 2
    told = [(each["level"], each["key"]) for each in json.loads(done.stdout)["findings"]]
    keys = ("rollout.sampling.max_new_tokens", "weight_sync.kv_cache", "model.path")
    assert told == [("error", key) for key in keys]
    with pytest.raises(ConfigError, match=r"max_new_tokens: 500 leaves no room .*kv_cache"):
        load_config(path, wrong)


def test_a_folder_that_holds_another_run_is_told_next_to_the_rest(make_config: ConfigMaker, tmp_path: Path) -> None:
    config = function_run(make_config, tmp_path, **{"rollout.engine.max_model_len": 4096})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert errors(config).keys() == {"run_dir", "rollout.engine.max_model_len"}


def test_a_context_beyond_the_models_positions(make_config: ConfigMaker, model_folder: Path, tmp_path: Path) -> None:
    reason = errors(make_config(**{"rollout.engine.max_model_len": 513}))["rollout.engine.max_model_len"]
    assert reason == "513 is more than the 512 positions that qwen3 supports; use at most 512"
    assert errors(make_config(**{"rollout.engine.max_model_len": 512})) == {}
    folder = changed_model(model_folder, tmp_path, rope_parameters={"rope_type": "yarn", "factor": 2.0})
    scaled = {"model.path": str(folder)}
    assert errors(make_config(**scaled, **{"rollout.engine.max_model_len": 1024})) == {}
    assert errors(make_config(**scaled, **{"rollout.engine.max_model_len": 1025})).keys() == {
        "rollout.engine.max_model_len"
    }


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, None),
        ({"max_position_embeddings": 100}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 4}}, 400),
        (
            {
                "max_position_embeddings": 400,
                "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 100},
            },
            400,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 100),
        (
            {
                "max_position_embeddings": 400,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 100},
            },
            100,
        ),
    ],
)
def test_positions_by_the_models_own_settings(settings: dict[str, Any], longest: int | None) -> None:
    assert longest_context(settings) == longest


def test_files_that_are_missing_from_the_models_folder(
    make_config: ConfigMaker, model_folder: Path, tmp_path: Path
) -> None:
    folder = changed_model(model_folder, tmp_path)
    config = make_config(**{"model.path": str(folder)})
    assert errors(config) == {}
    (folder / "tokenizer.json").unlink()
    assert "holds no tokenizer" in errors(config)["model.path"]
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in errors(config)["model.path"]


def test_a_hub_model_that_is_not_in_the_cache(make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(**{"model.path": "nobody/nothing"})
    assert "model.download=true" in errors(config)["model.path"]
    assert errors(make_config(**{"model.path": "nobody/nothing", "model.download": True})) == {}


def test_a_chat_template_that_the_tokenizer_lacks(make_config: ConfigMaker, model_folder: Path, tmp_path: Path) -> None:
    folder = changed_model(model_folder, tmp_path)
    config = make_config(**{"model.path": str(folder), "data.chat_template": True})
    assert "has no chat template" in errors(config)["data.chat_template"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert errors(config) == {}


@pytest.mark.parametrize("data", ["there", "missing"])
def test_a_reward_module_is_imported_in_other_processes_only(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    seen = tmp_path / "pids"
    source = f"import os\nopen({str(seen)!r}, 'a').write(f'{{os.getpid()}}\\n')\ndef score(response): return 0.0\n"
    (tmp_path / "leaves_its_pid.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"kind": "function", "import_path": "leaves_its_pid:score"}
    changes = {"rollout.environment": environment}
    if data == "missing":
        changes["data"] = {"train_path": str(tmp_path / "none.jsonl")}
    told = errors(function_run(make_config, tmp_path, **changes))
    assert told.keys() == ({"data.train_path"} if data == "missing" else set())
    pids = seen.read_text().split()
    assert pids
    assert str(os.getpid()) not in pids


def test_a_reward_module_that_hangs_does_not_hang_the_check(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs_at_import.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_pool, "_START_SECONDS", 1.0)
    environment = {"kind": "function", "import_path": "hangs_at_import:score"}
    told = errors(function_run(make_config, tmp_path, **{"rollout.environment": environment}))
    assert "took longer than 1.0 s" in told["rollout.environment.import_path"]


def test_a_column_that_a_later_record_lacks(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = tmp_path / "columns.jsonl"
    path.write_text('{"prompt": "a", "unit": 1}\n{"prompt": "b"}\n')
    environment = {"kind": "function", "import_path": "tests.support.column_rewards:later"}
    config = make_config(**{"data": {"train_path": str(path)}, "rollout.environment": environment})
    assert "the record of prompt 2 has no such column" in errors(config)["rollout.environment.import_path"]
    path.write_text('{"prompt": "a", "unit": 1}\n{"question": "b", "unit": 2}\n')
    assert ":2: has no column 'prompt'" in errors(config)["data.train_path"]


def test_a_math_problem_without_an_answer_further_down(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2"}\n')
    config = make_config(**{"data": {"train_path": str(path)}, "rollout.environment": {"kind": "math"}})
    assert "prompt 2 has no reference answer" in errors(config)["data.train_path"]


def test_stop_tokens_beyond_the_vocabulary(make_config: ConfigMaker, model_folder: Path) -> None:
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    config = make_config(**{"rollout.sampling.stop_token_ids": [vocabulary - 1, vocabulary]})
    told = errors(config)
    reason = f"[{vocabulary}] are outside the vocabulary of {vocabulary}"
    assert told == {"rollout.sampling.stop_token_ids": reason}
    with pytest.raises(CannotStart, match=r"stop_token_ids"):
        penstock.train(config)
    assert not Path(config.run_dir).exists()


CHATTY = (
    "{% if thinking is not defined %}{% set thinking = true %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'skip' %}{% continue %}{% endif %}"
    "{% generation %}{{ message.content }}{{ style }}{% endgeneration %}{% endfor %}"
    "{% if not messages %}{{ raise_exception('nothing to say') }}{% endif %}"
)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "named"])
def test_template_variables_are_those_that_the_template_reads(
    make_config: ConfigMaker, model_folder: Path, tmp_path: Path, place: str
) -> None:
    folder = changed_model(model_folder, tmp_path)
    if place == "chat_template.jinja":
        (folder / place).write_text(CHATTY)
    else:
        file = folder / "tokenizer_config.json"
        named = [{"name": "default", "template": CHATTY}, {"name": "other", "template": "{{ role }}"}]
        template = named if place == "named" else CHATTY
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    variables = {"thinking": False, "style": "x", "role": "x", "message": 3, "raise_exception": 1, "content": "x"}
    chat = {"model.path": str(folder), "data.chat_template": True, "data.chat_template_kwargs": variables}
    config = make_config(**chat)
    told = errors(config)
    assert told.keys() == {f"data.chat_template_kwargs.{n}" for n in ("role", "message", "raise_exception", "content")}
    with pytest.raises(ConfigError) as refused:
        build_serving(config, trains_too=False)
    assert refused.value.problems == [f"{key}: {reason}" for key, reason in told.items()]


def test_a_template_that_is_no_template(make_config: ConfigMaker, model_folder: Path, tmp_path: Path) -> None:
    folder = changed_model(model_folder, tmp_path)
    (folder / "chat_template.jinja").write_text("{% if %}")
    chat = {"model.path": str(folder), "data.chat_template": True, "data.chat_template_kwargs": {"a": 1}}
    assert "is not valid: line 1" in errors(make_config(**chat))["data.chat_template"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there(make_config: ConfigMaker) -> None:
    told = errors(make_config(**{"runtime.device": "cuda", "rollout.engine.max_model_len": 4096}))
    assert told.keys() == {"runtime.device", "rollout.engine.max_model_len"}


def test_an_evaluation_file_that_is_cut(make_config: ConfigMaker, tmp_path: Path) -> None:
    data = {"train_path": prompts(tmp_path / "train.jsonl", 24), "eval_path": prompts(tmp_path / "eval.jsonl", 70)}
    told = warnings(function_run(make_config, tmp_path, data=data))
    assert told.keys() == {"data.eval_size"}
    assert told["data.eval_size"].startswith("only the first 64 of 70 prompts in ")
    assert told["data.eval_size"].endswith("set it to 70 for all")
    assert warnings(function_run(make_config, tmp_path, data={**data, "eval_size": 70})) == {}


def test_data_that_leaves_nothing_to_train(make_config: ConfigMaker, tmp_path: Path) -> None:
    data = {"train_path": prompts(tmp_path / "few.jsonl", 3), "partial_step": "drop"}
    assert "leaves nothing to train" in errors(function_run(make_config, tmp_path, data=data))["data.partial_step"]


def test_a_run_says_its_warnings_on_the_console_and_in_its_events(
    make_config: ConfigMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        staleness={"policy": "windowed", "max_staleness": 1},
        **{"training.max_steps": 1, "observe.console": "plain", "eval.at_start": False, "eval.at_end": False},
    )
    expected = check_config(config)
    result = penstock.train(config)
    told = [line for line in lines(result.run_dir / "events.jsonl") if line["event"] == "warning"]
    assert [Problem(Level.WARNING, line["key"], line["reason"]) for line in told] == list(expected)
    assert len(expected) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"warning: {expected[0]}" in shown
    assert shown.count("may be trained without a correction") == 1


@pytest.mark.long
def test_a_run_with_data_of_a_relative_path_goes_on_from_another_folder(
    make_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts(tmp_path / "train.jsonl", 24)
    prompts(tmp_path / "eval.jsonl", 4)
    data = {"train_path": "train.jsonl", "eval_path": "eval.jsonl"}
    monkeypatch.chdir(tmp_path)
    config = function_run(make_config, tmp_path, data=data, **{"training.max_steps": 1})
    run_dir = penstock.train(config).run_dir
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert penstock.resume(run_dir, ["training.max_steps=2"]).summary["steps"] == 2


_CHECK = """
import sys
from penstock.cli.main import app
try:
    app(["config", "check", sys.argv[1], "--json"])
except SystemExit:
    pass
print(sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def test_the_check_needs_no_torch(make_config: ConfigMaker, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(function_run(make_config, tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, str(path)], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert json.loads(done.stdout) == {"ok": True, "findings": []}
    assert done.stderr.splitlines()[-1] == "[]"

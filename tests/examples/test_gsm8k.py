"""The GSM8K recipe: its data, its reward and its settings go together, and a run of it trains."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.rollout.environments import Split
from penstock.rollout.environments.factory import make_environment
from penstock.run.verify import memory
from tests.cli.programs import penstock as run_penstock
from tests.support.tiny_models import CHAT_TEMPLATE, bpe_tokenizer, save_tiny_model
from tests.test_docs import blocks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "gsm8k"
PUBLISHED = [
    {"question": "Natalia sold 48 clips, then half as many. How many?", "answer": "48/2=<<48/2=24>>24\n#### 72"},
    {"question": " How many dollars are 1,000 and 80?\n", "answer": "It is\n#### 1,080"},
    {"question": "What is 3 less 5?", "answer": "#### -2"},
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe's folder as a user has it after `prepare.py`."""
    folder = Path(shutil.copytree(FOLDER, tmp_path / "gsm8k", ignore=shutil.ignore_patterns("__pycache__", "runs")))
    published = tmp_path / "published"
    published.mkdir()
    for split in ("train", "test"):
        (published / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in PUBLISHED * 8))
    done = subprocess.run(
        [sys.executable, "prepare.py", str(published)], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "data/train.jsonl: 24 prompts\ndata/test.jsonl: 24 prompts\n"
    return folder


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    yield importlib.import_module("rewards")
    sys.modules.pop("rewards", None)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"Half of 48 is 24, so the answer is \boxed{72}.", 1.0),
        (r"First I thought \boxed{24}, but it is \boxed{72}", 1.0),
        (r"\boxed{72}, no: \boxed{24}", 0.0),
        (r"\boxed{\$72.00}", 1.0),
        (r"\boxed{x = 72}", 1.0),
        ("The answer is 72.", 0.0),
        (r"\boxed{seventy-two}", 0.0),
        (r"\boxed{}", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_for_the_last_boxed_number(rewards: Any, response: str, reward: float) -> None:
    assert rewards.correct_answer(prompt="p", response=response, answer="72") == reward


def test_separators_and_signs_are_understood(rewards: Any) -> None:
    assert rewards.correct_answer("p", r"\boxed{1,080}", "1080") == 1.0
    assert rewards.correct_answer("p", r"\boxed{-2}", "-2") == 1.0
    assert rewards.correct_answer("p", r"\boxed{2}", "-2") == 0.0


async def test_its_settings_find_its_data_and_its_reward(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe)
    monkeypatch.syspath_prepend(str(recipe))
    config = penstock.load_config("run.yaml")
    assert config.model.path == "Qwen/Qwen3-0.6B"
    environment = make_environment(config.rollout.environment, config.data, seed=config.seed)
    prompts = environment.prompts(Split.TRAIN)
    assert [(prompt.prompt_id, prompt.answer) for prompt in prompts[:3]] == [
        ("train-0", "72"),
        ("train-1", "1080"),
        ("train-2", "-2"),
    ]
    assert prompts[1].text.startswith("How many dollars are 1,000 and 80?\n\nReason step by step")
    await environment.close()


def test_data_that_is_not_gsm8k_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "?", "answer": "no mark"}\n')
    command = [sys.executable, str(FOLDER / "prepare.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "train: record 0 has no final answer after ####" in done.stderr) == (1, True)


def save_without_values(model: torch.nn.Module, file: Path) -> None:
    """A header with the model's parameters in bfloat16, and room for them that takes none on the disk."""
    header, begin = {}, 0
    for name, parameter in model.named_parameters():
        end = begin + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
        begin = end
    content = json.dumps(header).encode()
    with file.open("wb") as weights:
        weights.write(len(content).to_bytes(8, "little") + content)
        weights.truncate(8 + len(content) + begin)


@pytest.mark.parametrize(
    ("changes", "gibibytes"),
    [([], 28), (["rollout.engine.max_num_seqs=64"], 21), (["training.gradient_checkpointing=false"], 61)],
)
def test_it_needs_the_memory_its_page_says(
    changes: list[str], gibibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config_of_the_model = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    config_of_the_model.save_pretrained(tmp_path)
    with torch.device("meta"):
        save_without_values(Qwen3ForCausalLM(config_of_the_model), tmp_path / "model.safetensors")
    monkeypatch.setattr(memory, "pick_device", lambda name: torch.device("cuda"))
    config = penstock.load_config(FOLDER / "run.yaml", [f"model.path={tmp_path}", *changes])
    assert round(memory.estimate_memory(config).total / 2**30) == gibibytes


@pytest.mark.parametrize("page", ["README.md", "examples/gsm8k/README.md"])
def test_pages_give_the_estimates(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert "28 GiB" in text
    assert "with `rollout.engine.max_num_seqs=64`" in text.replace("With", "with")
    assert "21 GiB" in text


def test_the_readme_shows_the_recipe_as_it_is() -> None:
    shown = [block.code for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert (FOLDER / "run.yaml").read_text(encoding="utf-8") in shown
    assert (FOLDER / "rewards.py").read_text(encoding="utf-8") in shown


def test_the_readme_shows_a_record_as_prepare_writes_it(recipe: Path) -> None:
    [shown] = [block.code for block in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if block.info == "json"]
    record = json.loads((recipe / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    page = json.loads(shown)
    assert list(page) == list(record)
    assert record["prompt"].endswith(page["prompt"].partition("… ")[2])


@pytest.mark.long
def test_a_run_of_it_is_checked_trains_and_is_evaluated(recipe: Path) -> None:
    thinks = CHAT_TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}-{% endif %}"
    tokenizer = bpe_tokenizer(chat_template=thinks)
    model = save_tiny_model(recipe / "tiny", tokenizer=tokenizer, max_position_embeddings=1024)
    smaller = [
        f"model.path={model}",
        "rollout.sampling.max_new_tokens=8",
        "training.prompt_groups_per_step=4",
        "training.max_steps=2",
        "training.optimizer.warmup_steps=0",
        "eval.every_steps=1",
        "data.eval_size=4",
        "runtime.device=cpu",
    ]
    checked = run_penstock("config", "check", "run.yaml", *smaller, cwd=recipe)
    assert (checked.returncode, checked.stdout) == (0, "run.yaml: OK, 1 warning\n"), checked.stderr
    assert checked.stderr.startswith("warning: data.eval_size: only the first 4 of 24 prompts")
    trained = run_penstock("train", "run.yaml", *smaller, cwd=recipe)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((recipe / "runs" / "gsm8k" / "summary.json").read_text())
    assert summary["steps"] == 2
    scored = run_penstock("eval", "runs/gsm8k", "--json", cwd=recipe)
    assert scored.returncode == 0, scored.stderr

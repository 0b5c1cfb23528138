"""The wheel, built, installed and used where there is no repository."""

from __future__ import annotations

import email
import json
import re
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.package.venvs import ROOT, Installed, add_from_index, build_wheel, install, newer_interpreter

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MAKE_MODEL = """
import string
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

tokens = ["<pad>", "<eos>", *string.digits, *string.ascii_letters, *string.punctuation, " "]
inner = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\\s\\S]"), behavior="isolated")
inner.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
config = Qwen3Config(
    vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
    pad_token_id=0, eos_token_id=1, bos_token_id=None,
)
Qwen3ForCausalLM(config).save_pretrained("model")
tokenizer.save_pretrained("model")
"""
REWARD = """
def short(prompt, response, answer):
    return 1 / (1 + len(response))
"""
RUN = """
run_dir: runs/first
model: {path: model}
data: {train_path: train.jsonl, eval_path: train.jsonl, eval_size: 8}
rollout:
  environment: {kind: function, import_path: "my_rewards:short"}
  group_size: 2
  sampling: {max_new_tokens: 6}
training: {prompt_groups_per_step: 2, max_steps: 2}
runtime: {device: cpu, engine_threads: 1, trainer_threads: 1}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return metadata_of(wheel)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_string(content.read(name).decode())


@pytest.fixture(scope="module", params=["this", "newer"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """The wheel and its core dependencies, on the Python of these tests and on a newer one."""
    interpreter = sys.executable if request.param == "this" else newer_interpreter()
    if interpreter is None:
        pytest.skip(f"there is no Python newer than {sys.version_info.major}.{sys.version_info.minor} here")
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    made = install(wheel, core, interpreter, tmp_path_factory.mktemp("venv") / request.param)
    heavy = ("torch", "transformers")
    absent = [line for line in core if re.split(r"[<>=!~ ;\[]", line)[0] in made.missing and not line.startswith(heavy)]
    problem = add_from_index(made, absent) if absent else None
    if problem:
        pytest.skip(f"{interpreter} lacks {', '.join(absent)}, and the package index does not help: {problem}")
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder: data, a reward function, settings."""
    (tmp_path / "my_rewards.py").write_text(REWARD)
    records = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def test_it_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    kept = {path for path in (ROOT / "penstock").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(ROOT).as_posix() for path in kept}


def test_it_says_what_it_is(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])
    assert "reinforcement learning" in metadata["Keywords"]
    page = metadata.get_payload()
    assert "# Penstock" in page
    assert "](docs/" not in page
    extras = {"reasoning-gym", "math", "data", "environments", "loggers", "lora", "prometheus", "dev"}
    extras |= {"transfer-queue", "mooncake"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_a_release_shows_its_pictures_and_leads_to_its_pages(tmp_path: Path) -> None:
    """With the address of the repository set, as CONTRIBUTING.md asks for."""
    address = "https://example.org/team/penstock"
    metadata = metadata_of(build_wheel(tmp_path, f'Repository = "{address}"\nChangelog = "{address}/changes"\n'))
    assert metadata.get_all("Project-URL") == [f"Repository, {address}", f"Changelog, {address}/changes"]
    page, version = str(metadata.get_payload()), metadata["Version"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).is_file()
        assert f"]({address}/raw/v{version}/{picture})" in page
    assert f"[documentation]({address}/blob/v{version}/docs/index.md)" in page
    assert not re.search(r"\]\((?!https?:|#)", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))


def test_commands_that_need_no_model_work(installed: Installed, place: Path) -> None:
    where = installed.run("python", "-c", "import penstock; print(penstock.__file__)", cwd=place).stdout
    assert Path(where.strip()).is_relative_to(installed.folder)
    assert "penstock train" in installed.run("penstock", "--help", cwd=place).stdout
    shown = installed.run("penstock", "config", "show", "run.yaml", "training.max_steps=7", cwd=place)
    assert (shown.returncode, "max_steps: 7" in shown.stdout) == (0, True)
    schema = installed.run("penstock", "config", "schema", cwd=place)
    assert "rollout" in json.loads(schema.stdout)["properties"]


def test_doctor_tells_what_the_core_lacks(installed: Installed, place: Path) -> None:
    done = installed.run("penstock", "doctor", "--json", cwd=place)
    content = json.loads(done.stdout)
    parts = {part["name"]: part for part in content["parts"]}
    core = {"python", "torch", "transformers"} - set(installed.missing)
    core |= set() if "torch" in installed.missing else {"shared memory"}
    assert {name for name, part in parts.items() if part["status"] == "works"} == core
    assert (done.returncode, content["ok"]) == ((1, False) if installed.missing else (0, True))
    assert (parts["reasoning-gym"]["extra"], parts["math-verify"]["extra"]) == ("reasoning-gym", "math")
    assert parts["math-verify"]["install"] == "pip install 'math-verify>=0.8'"


def test_a_run_trains_and_is_evaluated(installed: Installed, place: Path) -> None:
    if installed.missing:
        pytest.skip(f"this Python has no {', '.join(installed.missing)}; a gigabyte is not fetched for a test")
    made = installed.run("python", "-c", MAKE_MODEL, cwd=place)
    assert made.returncode == 0, made.stderr
    checked = installed.run("penstock", "config", "check", "run.yaml", cwd=place)
    assert (checked.returncode, checked.stdout) == (0, "run.yaml: OK\n"), checked.stderr
    without = installed.run("penstock", "config", "check", "run.yaml", "rollout.environment={kind: math}", cwd=place)
    assert (without.returncode, "its extra `math`" in without.stderr) == (2, True)
    trained = installed.run("penstock", "train", "run.yaml", cwd=place)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((place / "runs" / "first" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert "<html" in (place / "runs" / "first" / "report.html").read_text()
    scored = installed.run("penstock", "eval", "runs/first", "--json", cwd=place)
    assert scored.returncode == 0, scored.stderr

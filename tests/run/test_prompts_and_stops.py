"""What a real run asks its model, where its responses end, and what it keeps of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.observe.report.build import write_report
from penstock.run.evaluate import evaluate
from penstock.run.train import resume
from tests.run.conftest import ConfigMaker, config_maker
from tests.run.test_train import lines
from tests.run.verifying import run_verify
from tests.support.tiny_models import char_tokenizer, save_tiny_model

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>{% endfor %}"
    "[assistant]{% if thinking is defined and not thinking %}(none)\n{% endif %}"
)
STOPS = ["e", "7", "%", "x", "12", "no\nway"]
CHAT: dict[str, Any] = {
    "data.chat_template": True,
    "data.chat_template_kwargs": {"thinking": False},
    "rollout.sampling": {"max_new_tokens": 40, "stop": STOPS},
    "rollout.engine": {"max_num_seqs": 12, "max_model_len": 192},
    "training.max_steps": 2,
}


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return save_tiny_model(tmp_path_factory.mktemp("chat_model"), tokenizer=tokenizer)


@pytest.fixture
def make_config(chat_folder: Path, tmp_path: Path) -> ConfigMaker:
    return config_maker(chat_folder, tmp_path)


def ends_where_it_should(response: str) -> bool:
    first = re.search("|".join(map(re.escape, STOPS)), response)
    return first is None or first.end() == len(response)


def test_a_run_asks_in_the_template_ends_at_stop_strings_and_keeps_both(make_config: ConfigMaker) -> None:
    config = make_config(**CHAT, **{"observe.samples_per_step": 12})
    penstock.train(config)
    run_dir = Path(config.run_dir)
    samples = lines(run_dir / "samples.jsonl")
    stopped = [sample for sample in samples if sample["response"].endswith(tuple(STOPS))]
    assert len(samples) == 24
    assert len(stopped) > 8
    for sample in samples:
        assert sample["rendered_prompt"] == f"[user]{sample['prompt']}<eos>[assistant](none)\n"
        assert ends_where_it_should(sample["response"])
    assert not any(sample["truncated"] for sample in stopped)
    page = write_report(run_dir).path.read_text()
    assert "[assistant](none)" in page
    with pytest.raises(ConfigError, match=r"data.chat_template_kwargs"):
        resume(run_dir, ["data.chat_template_kwargs={thinking: true}", "training.max_steps=3"])


@pytest.mark.long
def test_an_evaluation_ends_its_responses_at_them_too(make_config: ConfigMaker) -> None:
    plain = {key: value for key, value in CHAT.items() if key != "rollout.sampling"}
    with_stops, without = (
        evaluate(make_config(**plain, **{"rollout.sampling": {"max_new_tokens": 40} | stops}, **{"eval.greedy": False}))
        for stops in ({"stop": STOPS}, {})
    )
    assert with_stops["eval/truncation_rate"] < without["eval/truncation_rate"]
    assert with_stops["eval/response_length_mean"] < without["eval/response_length_mean"]


def test_verify_shows_the_first_prompt_as_the_model_sees_it(make_config: ConfigMaker, tmp_path: Path) -> None:
    prompt = run_verify(make_config(**CHAT), tmp_path, "--groups", "1").content["prompt"]
    assert re.fullmatch(r"\[user\].+<eos>\[assistant\]\(none\)\n", prompt["text"])
    assert prompt["token_ids"] == char_tokenizer()(prompt["text"])["input_ids"]


def test_a_variable_that_the_template_does_not_read_is_refused(make_config: ConfigMaker) -> None:
    misspelt = make_config(**CHAT | {"data.chat_template_kwargs": {"thinkin": False, "thinking": True}})
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.thinkin: .* does not read a var") as caught:
        penstock.train(misspelt)
    assert len(caught.value.problems) == 1
    assert not Path(misspelt.run_dir).exists()


def test_a_stop_string_that_is_a_token_without_text_ends_a_response(make_config: ConfigMaker) -> None:
    """No text shows the padding token, so that the text alone would never say that it was drawn."""
    from penstock.run.build import build_serving

    serving = build_serving(make_config(**CHAT | {"rollout.sampling": {"stop": ["<pad>", "a"]}}), trains_too=False)
    assert serving.sampling.stop_token_ids == {0, 1}
    assert serving.sampling.stop == ("<pad>", "a")

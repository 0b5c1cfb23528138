"""Loading model folders and hub ids: what is there is used as it is, what is not is refused by name."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.models import RunConfig
from penstock.config.sections.model import LoraConfig, ModelConfig
from penstock.errors import ConfigError, SetupError
from penstock.run.build import build_serving
from penstock.run.checks import check_config
from penstock.weights.hf import CausalLM, check_model_folder, load_model, load_tokenizer
from penstock.weights.lora import attach_lora
from tests.support.pickles import write_harmful_pickle
from tests.support.tiny_models import bpe_tokenizer, save_tiny_model, tiny_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def folder_config(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), **settings)


def run_config(folder: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train_size": 4, **data},
            "rollout": {"environment": {"kind": "reasoning_gym:chain_sum"}},
        }
    )


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Tokenizers


def test_tokenizer_json_alone_is_a_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tokenizer=bpe_tokenizer())
    for name in TOKENIZER_FILES[1:]:
        (folder / name).unlink(missing_ok=True)
    text = "the sum of two and three is 5!"
    tokenizer = load_tokenizer(folder_config(folder))
    assert tokenizer(text)["input_ids"] == bpe_tokenizer()(text)["input_ids"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=r"model\.path: .* holds no tokenizer"):
        load_tokenizer(folder_config(tmp_path))


def test_a_chat_template_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tokenizer=bpe_tokenizer(chat_template=None))
    with pytest.raises(ConfigError, match=r"data\.chat_template: .* no chat template"):
        build_serving(run_config(folder, chat_template=True), trains_too=False)


async def test_responses_end_at_every_end_token_of_the_folder_and_need_no_padding_token(tmp_path: Path) -> None:
    """Chat models name several in generation_config.json; ids that the model cannot draw are left out."""
    folder = save_tiny_model(tmp_path, tokenizer=bpe_tokenizer(pad=False))
    change_json(folder / "generation_config.json", eos_token_id=[5, 7, 10_000])
    serving = build_serving(run_config(folder), trains_too=False)
    assert serving.hf_tokenizer.pad_token is None
    assert serving.sampling.stop_token_ids == {1, 5, 7}
    await serving.close()


# Weights


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tied=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"model\.path: .* lacks 1 weights of Qwen3ForCausalLM.*lm_head\.weight"):
        load_model(folder_config(folder))


@pytest.mark.parametrize("damage", ["torn", "gone", "other sizes", "unknown family"])
def test_a_damaged_folder_is_a_setup_error(damage: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "gone":
        weights.unlink()
    elif damage == "other sizes":
        change_json(folder / "config.json", intermediate_size=7)
    else:
        change_json(folder / "config.json", model_type="wizard")
    with pytest.raises(SetupError, match=r"model\.path: a causal language model could not be loaded") as caught:
        load_model(folder_config(folder))
    assert len(str(caught.value)) < 600


def test_sdpa_is_refused_for_a_model_whose_attention_scores_are_capped(tmp_path: Path) -> None:
    """transformers drops the cap there without an error."""
    folder = save_tiny_model(tmp_path, family="gemma2")
    with pytest.raises(SetupError, match=r"model\.attn_implementation: sdpa leaves out .* gemma2 .*use eager"):
        load_model(folder_config(folder))
    assert load_model(folder_config(folder, attn_implementation="eager")).config._attn_implementation == "eager"


def test_a_head_that_does_more_than_is_known_is_refused() -> None:
    model = tiny_model()
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    model.forward = changed
    with pytest.raises(SetupError, match="changes logits after its head"):
        CausalLM(model)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = tiny_model()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(SetupError, match="no plain linear output head"):
        CausalLM(model)


# Hub ids


class Network:
    """Refuses every connection, and counts how often one was wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._refuse)
        monkeypatch.setattr(socket.socket, "connect", self._refuse)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        raise OSError("network is unreachable")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return Network(monkeypatch)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_id_is_not_looked_up_without_leave(load: Any, network: Network) -> None:
    with pytest.raises(SetupError, match=r"model\.path: 'org/tiny' is neither .* model\.download=true"):
        load(ModelConfig(path="org/tiny"))
    assert network.asked == 0


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_that_cannot_be_reached_is_said_quickly(load: Any, network: Network) -> None:
    started = time.monotonic()
    with pytest.raises(
        SetupError, match=r"model\.path: 'org/tiny' could not be downloaded from the hub: .*unreachable"
    ):
        load(ModelConfig(path="org/tiny", download=True))
    assert network.asked > 0
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("download", [False, True])
def test_a_hub_id_in_the_local_cache_is_loaded_from_there(download: bool, network: Network, tmp_path: Path) -> None:
    entry, commit = tmp_path / "hub" / "models--org--tiny", "0" * 40
    shutil.copytree(save_tiny_model(tmp_path / "made"), entry / "snapshots" / commit)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    config = ModelConfig(path="org/tiny", download=download)
    assert load_tokenizer(config)("12")["input_ids"] == [4, 5]
    assert type(load_model(config)).__name__ == "Qwen3ForCausalLM"
    assert download or network.asked == 0


# Pickles


def test_a_folder_with_pickled_weights_only_is_refused_by_name_and_not_opened(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    mark = write_harmful_pickle(folder / "pytorch_model.bin")
    for use in (lambda: check_model_folder(str(folder)), lambda: load_model(folder_config(folder))):
        with pytest.raises(SetupError, match=r"model\.path: the weights in .* are pickled \(pytorch_model\.bin\)"):
            use()
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": "shard.bin"}}, "shard.bin"),
        ("config.json", {"transformers_weights": "adapter_model.bin"}, "adapter_model.bin"),
    ],
)
def test_files_that_send_a_reader_to_a_pickle_are_refused(
    tmp_path: Path, file: str, content: dict[str, Any], named: str
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    mark = write_harmful_pickle(folder / named)
    with pytest.raises(SetupError, match=rf"are pickled \({named}\)"):
        load_model(folder_config(folder))
    assert not mark.exists()


def test_an_adapter_that_lies_pickled_in_a_model_folder_is_refused(tmp_path: Path) -> None:
    """transformers loads an adapter that it finds next to a model."""
    folder = save_tiny_model(tmp_path / "model")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    mark = write_harmful_pickle(folder / "adapter_model.bin")
    with pytest.raises(SetupError, match=r"are pickled \(adapter_model\.bin\)"):
        load_model(folder_config(folder))
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    marks = [write_harmful_pickle(folder / name) for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt")]
    load_model(folder_config(folder))
    assert not any(mark.exists() for mark in marks)


def test_an_adapter_to_start_from_that_is_pickled_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    mark = write_harmful_pickle(adapter / "adapter_model.bin")
    config = LoraConfig(path=str(adapter))
    with pytest.raises(SetupError, match=r"model\.lora\.path: the weights in .* are pickled \(adapter_model\.bin\)"):
        attach_lora(load_model(folder_config(folder)), config)
    settings = run_config(folder)
    lora = settings.model.model_copy(update={"lora": config})
    with pytest.raises(SetupError, match=r"model\.lora\.path: .* are pickled"):
        check_config(settings.model_copy(update={"model": lora, "run_dir": str(tmp_path / "run")}))
    assert not mark.exists()
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(SetupError, match=r"model\.lora\.path: .* adapter_model\.safetensors is missing"):
        attach_lora(load_model(folder_config(folder)), config)

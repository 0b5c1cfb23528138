"""`ModelFacts` are what a loaded model says, and reading them loads neither weights nor modelling code."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.sections.model import LoraConfig, ModelConfig
from penstock.errors import SetupError
from penstock.weights import stored_names
from penstock.weights.facts import ExpertFacts, ModelFacts, TokenFacts, read_facts, read_token_facts
from penstock.weights.hf import CausalLM, load_model
from penstock.weights.meta_model import ask_meta_model
from tests.support.pickles import write_harmful_pickle
from tests.support.tiny_models import FAMILIES, save_tiny_model
from tests.weights.test_loading import change_json


def folder_config(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), attn_implementation="eager", **settings)


def assert_equal_to_loaded(facts: ModelFacts, config: ModelConfig) -> None:
    """Everything that a loaded module can be asked for."""
    model = load_model(config)
    text, lm = model.config.get_text_config(), CausalLM(model)
    own = {name: (str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    assert facts.architecture == type(model).__name__
    assert facts.model_type == text.model_type
    assert facts.vocabulary == lm.head_weight_VH.shape[0]
    assert {one.name: (one.dtype, one.shape) for one in facts.parameters} == own
    assert len(facts.parameters) == len(own)
    assert dict(facts.tied).keys() == every.keys() - own.keys()
    assert all(every[name] is every[other] for name, other in facts.tied)
    assert facts.count == sum(p.numel() for p in model.parameters())
    assert facts.bytes == sum(p.numel() * p.itemsize for p in model.parameters())
    assert facts.head.transform == lm.transform
    assert facts.head.has_bias == (lm.head_bias_V is not None)
    eos = model.generation_config.eos_token_id
    assert list(facts.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert facts.longest_context == text.max_position_embeddings
    attention = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
    assert facts.layers.layers == len(model.base_model.layers)
    assert facts.layers.hidden == lm.head_weight_VH.shape[1]
    assert facts.layers.head_dimension == attention.head_dim
    assert facts.layers.heads * facts.layers.head_dimension == attention.q_proj.weight.shape[0]
    assert facts.layers.key_value_heads * facts.layers.head_dimension == attention.k_proj.weight.shape[0]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_what_the_loaded_model_says(family: str, tied: bool, tmp_path: Path) -> None:
    config = folder_config(save_tiny_model(tmp_path, family=family, tied=tied))
    assert_equal_to_loaded(read_facts(config), config)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_parameters_have_the_dtype_they_are_loaded_in(dtype: Any, tmp_path: Path) -> None:
    config = folder_config(save_tiny_model(tmp_path), dtype=dtype)
    assert_equal_to_loaded(read_facts(config), config)


def test_experts_and_their_layers_are_counted(tmp_path: Path) -> None:
    """One layer is dense: only the others have a router."""
    folder = save_tiny_model(tmp_path, family="qwen3_moe", layers=3, mlp_only_layers=[1])
    config = folder_config(folder)
    facts = read_facts(config)
    assert facts.experts == ExpertFacts(layers=(0, 2), experts=4, top_k=2)
    assert_equal_to_loaded(facts, config)
    sparse = [i for i, layer in enumerate(load_model(config).model.layers) if hasattr(layer.mlp, "experts")]
    assert list(facts.experts.layers) == sparse
    assert read_facts(folder_config(save_tiny_model(tmp_path / "dense"))).experts is None


def test_weights_in_several_files_are_all_found(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "one", family="qwen3_moe")
    whole = read_facts(folder_config(folder))
    load_model(folder_config(folder)).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    config = folder_config(folder)
    assert_equal_to_loaded(read_facts(config), config)
    assert set(read_facts(config).parameters) == set(whole.parameters)


def test_adapters_change_nothing(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    assert read_facts(folder_config(folder, lora=LoraConfig(rank=2))) == read_facts(folder_config(folder))


@pytest.mark.parametrize("alike", [True, False], ids=["with equal weights", "with other weights"])
def test_a_head_that_is_stored_although_tied_is_tied_if_it_is_alike(alike: bool, tmp_path: Path) -> None:
    """Files of old versions have both; transformers ties them only if they hold the same numbers."""
    folder = save_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (0.0 if alike else 1.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder_config(folder)
    assert bool(read_facts(config).tied) == alike
    assert_equal_to_loaded(read_facts(config), config)


@pytest.mark.parametrize("eos", [[5, 7], 3, None])
@pytest.mark.parametrize("has_generation_config", [True, False])
def test_end_tokens_are_those_of_the_generation_config_or_else_of_the_config(
    eos: Any, has_generation_config: bool, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path)
    if has_generation_config:
        change_json(folder / "generation_config.json", eos_token_id=eos)
    else:
        (folder / "generation_config.json").unlink()
        change_json(folder / "config.json", eos_token_id=eos)
    config = folder_config(folder)
    assert_equal_to_loaded(read_facts(config), config)


def test_a_longer_context_by_yarn_counts(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    change_json(
        folder / "config.json",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
        },
    )
    assert read_facts(folder_config(folder)).longest_context == 1024


def test_families_that_are_renamed_while_they_are_loaded_are_asked_of_a_model_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noted(config: ModelConfig) -> Any:
        asked.append(config.path)
        model = load_model(config)
        return {name: tuple(p.shape) for name, p in model.named_parameters()}, {}

    monkeypatch.setattr(stored_names, "ask_meta_model", noted)
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    MixtralForCausalLM(
        MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=2, vocab_size=32, max_position_embeddings=64)
    ).save_pretrained(tmp_path)
    config = folder_config(tmp_path)
    facts = read_facts(config)
    assert asked == [str(tmp_path)]
    assert facts.experts == ExpertFacts(layers=(0,), experts=2, top_k=2)
    assert_equal_to_loaded(facts, config)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "phi"])
def test_a_model_without_memory_says_the_same_as_the_files(family: str, tmp_path: Path) -> None:
    config = folder_config(save_tiny_model(tmp_path, family=family))
    facts = read_facts(config)
    shapes, tied = ask_meta_model(config)
    assert shapes == {parameter.name: parameter.shape for parameter in facts.parameters}
    assert tied == dict(facts.tied)


@pytest.mark.long
def test_a_model_that_cannot_be_built_is_a_setup_error(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    change_json(folder / "config.json", num_attention_heads=0)
    with pytest.raises(SetupError, match=r"model\.path: a causal language model could not be loaded from"):
        ask_meta_model(folder_config(folder))


@pytest.mark.parametrize("damage", ["torn", "gone", "not a header", "unknown family", "no index"])
def test_a_damaged_folder_is_a_setup_error(damage: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "gone":
        weights.unlink()
    elif damage == "not a header":
        weights.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    elif damage == "no index":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text("{}")
    else:
        change_json(folder / "config.json", model_type="wizard")
    with pytest.raises(SetupError, match=r"model\.path: ") as caught:
        read_facts(folder_config(folder))
    assert len(str(caught.value)) < 600


def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    trace = write_harmful_pickle(folder / "pytorch_model.bin")
    with pytest.raises(SetupError, match=r"are pickled \(pytorch_model\.bin\)"):
        read_facts(folder_config(folder))
    assert not trace.exists()


_READ = """
import json, sys
from penstock.config.sections.model import ModelConfig
from penstock.weights.facts import read_facts
from penstock.weights.hf import load_tokenizer
config = ModelConfig(path=sys.argv[1])
load_tokenizer(config)
facts = read_facts(config)
models = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
print(json.dumps({"models": models, "count": facts.count}))
"""


def test_reading_them_imports_no_modelling_code(tmp_path: Path) -> None:
    """The table of model names, `modeling_auto`, comes with tokenizers; it has no model in it."""
    folder = save_tiny_model(tmp_path, family="qwen3_moe")
    done = subprocess.run(
        [sys.executable, "-c", _READ, folder], capture_output=True, text=True, check=True, timeout=120
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert set(answer["models"]) <= {"transformers.models.auto.modeling_auto"}
    assert answer["count"] == sum(p.numel() for p in load_model(folder_config(folder)).parameters())


def test_facts_of_a_model_larger_than_any_memory_are_read_at_once(tmp_path: Path) -> None:
    """No weight is read: the file has 4 TB of nothing behind its header."""
    folder, rows = save_tiny_model(tmp_path), 2**35
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    name, begin, sizes = "model.embed_tokens.weight", 0, {"F32": 4}
    for entry in (entry for key, entry in header.items() if key != "__metadata__"):
        if entry["shape"] == list(tensors[name].shape):
            entry["shape"] = [rows, 32]
        size = math.prod(entry["shape"]) * sizes[entry["dtype"]]
        entry["data_offsets"] = [begin, begin + size]
        begin += size
    content = json.dumps(header).encode()
    with weights.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + begin)
    change_json(folder / "config.json", vocab_size=rows)
    facts = read_facts(folder_config(folder))
    assert facts.vocabulary == rows
    assert facts.bytes > 2**42


def test_a_file_that_the_config_names_is_the_one_that_is_read(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    change_json(folder / "config.json", transformers_weights="own.safetensors")
    config = folder_config(folder)
    assert_equal_to_loaded(read_facts(config), config)


@pytest.mark.parametrize("model_type", ["gpt2", "mamba"])
def test_what_a_run_needs_is_read_without_shapes_and_of_models_without_heads(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(config: ModelConfig) -> Any:
        raise AssertionError("a start must not wait for a model without memory")

    monkeypatch.setattr(stored_names, "ask_meta_model", asked)
    settings = {"model_type": model_type, "vocab_size": 64, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_token_facts(folder_config(tmp_path)) == TokenFacts(vocabulary=64, eos_token_ids=(3,))


def test_a_config_that_does_not_say_enough_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_names, "ask_meta_model", lambda config: ({"weight": (2, 2)}, {}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 1}))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=r"model\.path: the config of .* does not say enough: .*num_attention_heads"):
        read_facts(folder_config(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_of_reading_agree(family: str, tmp_path: Path) -> None:
    config = folder_config(save_tiny_model(tmp_path, family=family))
    facts = read_facts(config)
    assert read_token_facts(config) == TokenFacts(facts.vocabulary, facts.eos_token_ids)

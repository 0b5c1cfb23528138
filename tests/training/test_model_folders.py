"""Real model folders: every family is loaded, trained, served and saved; its numbers are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.config.sections.model import ModelConfig
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.fields import (
    ADVANTAGE,
    GENERATION_LOGPROBS,
    INPUT_IDS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKEN_VERSIONS,
    TRAIN_FIELDS,
    sample_id,
)
from penstock.data_plane.meta import KVBatchMeta
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.handle import HFTokenizer
from penstock.weights.hf import load_model, load_tokenizer
from tests.engines.helpers import generate_all, request
from tests.support.tiny_models import FAMILIES, bpe_tokenizer, plain_copy, save_tiny_model, tiny_model
from tests.training.reference import row_logprobs, whole_batch_loss
from tests.training.support import (
    LOGPROBS,
    PARTITION,
    algorithm,
    bit_equal,
    data_plane,
    gradients,
    put_groups,
    relative_difference,
    trainer,
    weights,
    worst_difference,
)

ATTENTION = {"gemma2": "eager"}
"""Gemma2 caps attention scores, which only eager attention does on a CPU."""


def model_config(folder: Path, family: str = "", **settings: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {"path": str(folder), "attn_implementation": ATTENTION.get(family, "sdpa"), **settings}
    )


def put_responses(
    plane: MemoryDataPlane, prompt: Sequence[int], results: Sequence[GenerationResult], name: str
) -> KVBatchMeta:
    """The engine's responses as rows of one group."""
    rows: dict[str, list[Tensor]] = {key: [] for key in (INPUT_IDS, TOKEN_MASK, GENERATION_LOGPROBS, TOKEN_VERSIONS)}
    for result in results:
        new = len(result.token_ids)
        zeros, ones = torch.zeros(len(prompt)), torch.ones(new)
        rows[INPUT_IDS].append(torch.tensor([*prompt, *result.token_ids]))
        rows[TOKEN_MASK].append(torch.cat([zeros, ones]))
        rows[GENERATION_LOGPROBS].append(torch.cat([zeros, torch.tensor(result.logprobs)]))
        rows[TOKEN_VERSIONS].append(torch.cat([zeros - 1, torch.tensor(result.token_versions)]).int())
    columns: dict[str, Any] = {key: JaggedColumn.from_rows(values) for key, values in rows.items()}
    columns[ADVANTAGE] = torch.tensor([1.0, -1.0] * (len(results) // 2))
    columns[SAMPLE_MASK] = torch.ones(len(results))
    ids = tuple(sample_id(name, index) for index in range(len(results)))
    plane.put_samples(ids, columns, PARTITION)
    return KVBatchMeta(PARTITION, ids, frozenset(TRAIN_FIELDS), tuple(row.shape[0] for row in rows[INPUT_IDS]))


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_folder_is_loaded_trained_served_and_saved(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family=family, tokenizer=bpe_tokenizer())
    config = model_config(folder, family)
    tokenizer = HFTokenizer(load_tokenizer(config), chat_template=True)
    prompt = tokenizer.encode_prompt("what is the sum of one and two?")
    assert tokenizer.encode("<|user|>what is the sum of one and two?<eos><|assistant|>") == prompt
    assert tokenizer.decode(prompt) == "what is the sum of one and two?"

    model, plane = load_model(config), data_plane()
    engine = EmbeddedEngine(plain_copy(model), max_num_seqs=4, max_model_len=64)
    local = trainer(model, plane, temperature=0.9, optimizer={"lr": 1e-2})
    for step in range(2):
        asked = [request(f"{step}-{i}", prompt, new=24, seed=i, temperature=0.9) for i in range(4)]
        results = await generate_all(engine, asked)
        assert {version for result in results for version in result.token_versions} == {step}
        done = await local.train(step, [put_responses(plane, prompt, results, f"s{step}")])
        assert done.updated
        assert done.metrics["mismatch_logprob_max_abs"] < 1e-4
        await engine.pause()
        await engine.update_weights(await local.publish_weights())
        await engine.resume()
    await engine.close()

    (await local.snapshot()).write(tmp_path)
    await local.close()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bit_equal(weights(saved), weights(model))
    original = AutoModelForCausalLM.from_pretrained(folder)
    assert relative_difference(weights(original), weights(model)) > 1e-3


@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_log_probs_and_gradients_are_those_of_the_models_own_forward(family: str, batching: str) -> None:
    """Rows reach beyond the windows of 8 tokens."""
    model, plane, rules = tiny_model(family), data_plane(), algorithm()
    metas = put_groups(plane, 2)
    assert max(metas[0].sequence_lengths) > 8
    local = trainer(model, plane, batching=batching, temperature=0.7, max_tokens_per_microbatch=64)
    await local.compute_logprobs(metas[0], LOGPROBS)
    batch = plane.get_samples(metas[0], (INPUT_IDS, LOGPROBS))
    for row in range(len(metas[0])):
        with torch.no_grad():
            expected_L = row_logprobs(model, batch.jagged(INPUT_IDS).row(row), 0.7)
        torch.testing.assert_close(batch.jagged(LOGPROBS).row(row)[1:], expected_L, rtol=0, atol=2e-5)

    whole_batch_loss(model, plane, metas, rules, 0.7).backward()
    textbook = gradients(model)
    await local.begin_train_step(0)
    for meta in metas:
        await local.train_microbatch(0, meta)
    raw = gradients(model)
    tokens = (await local.finish_train_step(0)).metrics["tokens"]
    await local.close()
    assert relative_difference(textbook, {name: value / tokens for name, value in raw.items()}) < 1e-5
    biases = {name for name in raw if name.endswith("k_proj.bias")}  # a key bias moves no softmax: rounding alone
    found = {name: value / tokens for name, value in raw.items() if name not in biases}
    assert worst_difference({name: textbook[name] for name in found}, found) < 1e-3


def test_weights_in_several_files_are_loaded(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert bit_equal(weights(load_model(model_config(tmp_path))), weights(model))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_dtype_is_that_of_the_setting_whatever_the_folder_holds(dtype: str, tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_model(model_config(tmp_path, dtype=dtype))
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    assert bit_equal(weights(loaded), weights(model.to(getattr(torch, dtype))))


@pytest.mark.parametrize(("attention", "uses_torchs"), [("sdpa", True), ("eager", False)])
def test_the_attention_implementation_is_that_of_the_setting(
    attention: str, uses_torchs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(model_config(save_tiny_model(tmp_path), attn_implementation=attention))
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    loaded(torch.arange(5)[None])
    assert bool(calls) == uses_torchs


def test_plain_text_begins_as_the_tokenizer_begins_it_and_a_template_brings_its_own_beginning() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|user|>"})
    bos = tokenizer.bos_token_id
    plain = HFTokenizer(tokenizer, chat_template=False)
    assert plain.encode_prompt("one") == plain.encode("one")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A <eos>", special_tokens=[("<|user|>", bos), ("<eos>", 1)]
    )
    opened = HFTokenizer(tokenizer, chat_template=False)
    assert opened.encode_prompt("one") == (bos, *opened.encode("one"))
    assert HFTokenizer(tokenizer, chat_template=True).encode_prompt("one").count(bos) == 1


async def test_a_model_that_could_also_see_is_trained_and_served_on_text(tmp_path: Path) -> None:
    """Folders of such models load as their whole self; the tower for images stays as it is."""
    import transformers as hf

    text = tiny_model("gemma3").config
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = hf.Gemma3Config(text_config=text.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14})
    hf.Gemma3ForConditionalGeneration(whole).save_pretrained(tmp_path)
    model, plane, prompt = load_model(model_config(tmp_path)), data_plane(), tuple(range(3, 15))
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    before = weights(model)
    engine = EmbeddedEngine(plain_copy(model), max_num_seqs=4, max_model_len=64)
    results = await generate_all(engine, [request(f"r{i}", prompt, new=16, seed=i) for i in range(4)])
    await engine.close()
    local = trainer(model, plane)
    done = await local.train(0, [put_responses(plane, prompt, results, "s")])
    await local.close()
    assert done.metrics["mismatch_logprob_max_abs"] < 1e-4
    changed = {name.split(".")[1] for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert changed == {"language_model"}

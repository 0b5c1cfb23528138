"""The memory estimate of `penstock verify`: exact where it can be measured, near where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.models import RunConfig
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.run.build import build_serving
from penstock.run.verify.memory import activation_bytes, estimate_memory, in_words, microbatch_tokens
from penstock.runtime.free_memory import available_bytes, container_bytes, free_bytes
from penstock.training.backends.local.optimizer import PolicyOptimizer
from penstock.training.backends.local.policy import Policy
from penstock.training.batching import Microbatch
from penstock.weights.hf import load_model
from penstock.weights.lora import attach_lora
from tests.run.conftest import ConfigMaker
from tests.support.tiny_models import FAMILIES, save_tiny_model, tiny_model


def trained_model(config: RunConfig) -> Any:
    model = load_model(config.model)
    return model if config.model.lora is None else attach_lora(model, config.model.lora)


def optimizer_after_a_step(model: Any) -> PolicyOptimizer:
    from penstock.config.sections.training import OptimizerConfig

    optimizer = PolicyOptimizer(model, OptimizerConfig(), None)
    optimizer.add_gradients([torch.zeros_like(parameter) for parameter in optimizer.parameters])
    optimizer.step(0.0)
    return optimizer


def total_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.dtype": "float32"},
        {"model.dtype": "float64"},
        {"model.dtype": "bfloat16"},
        {"model.lora": {"rank": 3}},
        {"model.lora": {"rank": 3}, "model.dtype": "bfloat16"},
    ],
    ids=str,
)
def test_weights_gradients_and_optimizer_are_exact(make_config: ConfigMaker, changes: dict[str, Any]) -> None:
    config = make_config(**changes, **{"runtime.trainer_lanes": 1})
    estimate, model = estimate_memory(config), trained_model(config)
    assert estimate.trainer_weights == total_bytes(model.parameters())
    assert estimate.engine_weights == total_bytes(load_model(config.model).parameters())
    optimizer = optimizer_after_a_step(model)
    assert estimate.gradients == total_bytes(optimizer.gradients().values())
    assert estimate.optimizer == total_bytes(optimizer.state_tensors().values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_keys_and_values_are_exact(make_config: ConfigMaker, dtype: str) -> None:
    config = make_config(**{"model.dtype": dtype, "rollout.engine": {"max_num_seqs": 7, "max_model_len": 50}})
    serving = build_serving(config, trains_too=False)
    try:
        (engine,) = (rank.engine for rank in serving.engines.ranks)
        assert isinstance(engine, EmbeddedEngine)
        cache = engine._runner.cache
        assert estimate_memory(config).kv_cache == total_bytes([cache._keys_YSKCD, cache._values_YSKCD])
    finally:
        await serving.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_estimated_without_its_weights(
    family: str, make_config: ConfigMaker, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", family=family)
    attention = "eager" if family == "gemma2" else "sdpa"
    estimate = estimate_memory(make_config(**{"model": {"path": str(folder), "attn_implementation": attention}}))
    assert estimate.engine_weights == total_bytes(tiny_model(family, vocabulary=_vocabulary(folder)).parameters())


def _vocabulary(folder: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)


def saved_for_backward(model: Any, rows: int, length: int, *, checkpointing: bool) -> int:
    """Bytes that a forward pass keeps, each storage once, without the weights."""
    policy = Policy(model, temperature=1.0, chunk_tokens=64, gradient_checkpointing=checkpointing)
    ids_BL = torch.randint(3, 90, (rows, length))
    places_BL = torch.arange(rows * length).view(rows, length)
    predictors_T = places_BL[:, :-1].flatten()
    batch = Microbatch(ids_BL, None, predictors_T, predictors_T + 1, ids_BL[:, 1:].flatten())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = policy.logprobs(batch)
    assert result
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gemma3", "phi"])
def test_activations_are_near_what_a_pass_keeps(family: str) -> None:
    model = tiny_model(family, hidden=64, layers=4)
    shape = model.config.get_text_config()
    estimate = activation_bytes(shape, 8 * 64, 4, row=64, scores=False, checkpointing=False)
    assert 0.75 < estimate / saved_for_backward(model, 8, 64, checkpointing=False) < 1.6


def test_checkpointing_keeps_one_layer_and_the_others_inputs() -> None:
    model = tiny_model(hidden=64, layers=8)
    shape = model.config.get_text_config()
    whole, checkpointed = (
        activation_bytes(shape, 512, 4, row=64, scores=False, checkpointing=each) for each in (False, True)
    )
    assert saved_for_backward(model, 8, 64, checkpointing=True) < checkpointed < whole / 3


def test_a_reference_policy_is_a_copy_unless_there_is_an_adapter(make_config: ConfigMaker) -> None:
    penalty = {"algorithm.kl": {"coefficient": 0.1}}
    assert estimate_memory(make_config()).reference_weights == 0
    estimate = estimate_memory(make_config(**penalty))
    assert estimate.reference_weights == estimate.engine_weights
    assert estimate_memory(make_config(**penalty, **{"model.lora": {"rank": 2}})).reference_weights == 0


def test_a_microbatch_is_no_larger_than_a_step_nor_smaller_than_a_row(make_config: ConfigMaker) -> None:
    small = make_config(**{"training.max_tokens_per_microbatch": 10})
    assert microbatch_tokens(small, 2) == (96, 192)
    large = make_config(**{"training.max_tokens_per_microbatch": 10**6})
    assert microbatch_tokens(large, 2) == (4 * 3 * 96, 4 * 3 * 96)


def test_free_memory_is_the_containers_where_it_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert container_bytes(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert container_bytes(tmp_path) > 2**60
    assert container_bytes(tmp_path / "none") > 2**60


def test_free_memory_is_what_the_machine_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16 kB\nMemAvailable:    8 kB\n")
    assert available_bytes(meminfo) == 8192
    assert available_bytes(tmp_path / "none") > 2**20
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**60


@pytest.mark.parametrize(("count", "words"), [(12, "12 bytes"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_bytes_in_words(count: int, words: str) -> None:
    assert in_words(count) == words

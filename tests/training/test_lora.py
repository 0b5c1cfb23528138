"""LoRA: the adapters' gradients are those of the formula, the base never changes, and others see a plain model."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from penstock.config.sections.model import LoraConfig
from penstock.errors import SetupError
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.training.backends.local.policy import Policy
from penstock.training.batching import Microbatch
from penstock.training.flops import FlopCounter
from penstock.weights.hf import named_weights
from penstock.weights.lora import LoraAdapter, attach_lora, merge_lora
from tests.engines.helpers import generate_all, request
from tests.support.tiny_models import plain_copy, tiny_model
from tests.training.reference import whole_batch_loss
from tests.training.support import (
    algorithm,
    bit_equal,
    comparable,
    data_plane,
    gradients,
    put_groups,
    relative_difference,
    trainer,
    weights,
    without_float32_islands,
    worst_difference,
)
from tests.training.test_model_folders import put_responses
from tests.training.test_streaming import assert_same, three_steps

FAMILIES = ("qwen3", "qwen3_moe", "gemma2", "phi")
SCALE = 8 / 4


def adapted(family: str = "qwen3", *, model: Any = None, stirred: bool = True, **settings: Any) -> Any:
    """A model with adapters of rank 4; `stirred`: already trained a bit, so that they have an effect."""
    peft_model = attach_lora(model or tiny_model(family), LoraConfig(rank=4, alpha=8, **settings), seed=3)
    if stirred:
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
    return peft_model


def adapter_of(peft_model: Any) -> LoraAdapter:
    adapter = LoraAdapter.of(peft_model)
    assert adapter is not None
    return adapter


class Summed:
    """The textbook: a plain model called with `W + scale * B @ A` in the place of `W`."""

    def __init__(self, plain: Any, peft_model: Any) -> None:
        self.plain, adapter = plain, adapter_of(peft_model)
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        for name in adapter.adapted:
            layer = adapter.model.get_submodule(name.removesuffix(".weight"))
            one, two = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            self.parts[name] = (one.detach().clone().requires_grad_(), two.detach().clone().requires_grad_())

    def __call__(self, **args: Any) -> Any:
        own = dict(self.plain.named_parameters())
        sums = {name: own[name].detach() + SCALE * two @ one for name, (one, two) in self.parts.items()}
        return functional_call(self.plain, sums, kwargs=args)

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, (one, two) in self.parts.items():
            assert one.grad is not None
            assert two.grad is not None
            stem = "base_model.model." + name.removesuffix(".weight")
            found |= {f"{stem}.lora_A.default.weight": one.grad, f"{stem}.lora_B.default.weight": two.grad}
        return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
async def test_gradients_equal_those_of_an_explicit_low_rank_sum(targets: Any, checkpointing: bool) -> None:
    base, plane = without_float32_islands(tiny_model().double()), data_plane()
    peft_model = adapted(model=copy.deepcopy(base), target_modules=targets)
    assert len(adapter_of(peft_model).adapted) == 2 * (2 if isinstance(targets, list) else 7)
    metas = put_groups(plane, 3)
    textbook = Summed(base, peft_model)
    whole_batch_loss(textbook, plane, metas, algorithm(), 0.7).backward()
    local = trainer(
        peft_model, plane, temperature=0.7, gradient_checkpointing=checkpointing, max_tokens_per_microbatch=64
    )
    await local.begin_train_step(0)
    for meta in metas:
        await local.train_microbatch(0, meta)
    raw = gradients(peft_model)
    result = await local.finish_train_step(0)
    await local.close()
    found = {name: value / result.metrics["tokens"] for name, value in raw.items()}
    assert worst_difference(textbook.gradients(), found) < 1e-10
    norm = torch.cat([value.flatten() for value in found.values()]).norm().item()
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
async def test_only_the_adapters_change(family: str) -> None:
    base = weights(tiny_model(family))
    peft_model, plane = adapted(family, stirred=False), data_plane()
    adapter = adapter_of(peft_model)
    assert bit_equal(dict(named_weights(peft_model)), base)
    local = trainer(peft_model, plane, optimizer={"lr": 1e-2, "weight_decay": 0.1})
    for step in range(3):
        await local.train(step, put_groups(plane, 2, seed=step, name=f"s{step}p"))
    await local.close()
    merged = dict(named_weights(peft_model))
    changed = [name for name in base if not torch.equal(merged[name], base[name])]
    assert changed == adapter.adapted
    with adapter.disabled():
        ids_BT = torch.arange(3, 23)[None]
        assert torch.equal(adapter.model(ids_BT).logits, tiny_model(family)(ids_BT).logits)
    frozen = {name: p for name, p in peft_model.named_parameters() if ".lora_" not in name}
    assert not any(p.requires_grad or p.grad is not None for p in frozen.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_streamed_steps_equal_whole_batch_steps(family: str) -> None:
    runs = [await three_steps(adapted(model=tiny_model(family).double()), k) for k in (1, 5)]
    assert_same(*runs, torch.float64)


async def test_checkpointed_layers_are_computed_again_and_give_the_same_bits() -> None:
    results = []
    for checkpointing in (False, True):
        peft_model, plane, calls = adapted(), data_plane(), []
        layer = adapter_of(peft_model).model.model.layers[0]
        layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        local = trainer(peft_model, plane, gradient_checkpointing=checkpointing)
        calls.clear()
        await local.train(0, put_groups(plane, 2))
        await local.close()
        results.append((weights(peft_model), len(calls)))
    assert bit_equal(results[0][0], results[1][0])
    assert results[1][1] == 2 * results[0][1]


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_engine_that_takes_the_merged_weights_samples_from_the_trained_policy(family: str) -> None:
    peft_model, plane, prompt = adapted(family), data_plane(), tuple(range(3, 15))
    engine = EmbeddedEngine(plain_copy(peft_model), max_num_seqs=4, max_model_len=64)
    local = trainer(peft_model, plane, optimizer={"lr": 1e-2})
    for step in range(3):
        results = await generate_all(engine, [request(f"{step}-{i}", prompt, new=20, seed=i) for i in range(4)])
        done = await local.train(step, [put_responses(plane, prompt, results, f"s{step}")])
        assert done.metrics["mismatch_logprob_max_abs"] < 1e-4
        await engine.pause()
        await engine.update_weights(await local.publish_weights())
        await engine.resume()
    await engine.close()
    await local.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_into_its_own_memory_it_is_the_plain_model(family: str) -> None:
    peft_model = adapted(family)
    parameters = {id(parameter) for parameter in peft_model.parameters()}
    wanted = {name: tensor.clone() for name, tensor in adapter_of(peft_model).merged_weights()}
    plain = merge_lora(peft_model)
    assert bit_equal(dict(plain.named_parameters()), wanted)
    assert {id(parameter) for parameter in plain.parameters()} < parameters
    assert LoraAdapter.of(plain) is None
    ids_BL = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids_BL).logits, plain_copy(plain)(ids_BL).logits)


def test_the_reference_policy_is_the_base_model() -> None:
    policy = Policy(adapted(), temperature=1.0, chunk_tokens=64, gradient_checkpointing=False, keep_reference=True)
    base = Policy(tiny_model(), temperature=1.0, chunk_tokens=64, gradient_checkpointing=False)
    ids_BL = torch.arange(3, 23)[None]
    microbatch = Microbatch(ids_BL, None, torch.arange(19), torch.arange(1, 20), ids_BL[0, 1:])
    reference_T, expected_T = policy.reference_logprobs(microbatch)[0], base.logprobs(microbatch)[0].detach()
    # The plain model takes the lean way, the adapted one its own: equal but for rounding.
    torch.testing.assert_close(reference_T, expected_T, rtol=1e-5, atol=1e-6)
    assert not reference_T.requires_grad
    own_T = policy.logprobs(microbatch)[0]
    assert own_T.requires_grad
    assert float((own_T - expected_T).detach().abs().max()) > 0.01


# Checkpoints


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_checkpoint_is_a_model_an_adapter_and_a_place_to_go_on_from(family: str, tmp_path: Path) -> None:
    import peft

    plane = data_plane()
    metas = [put_groups(plane, 2, seed=step, name=f"s{step}p") for step in range(4)]
    peft_model = adapted(family)
    local = trainer(peft_model, plane, optimizer={"lr": 1e-2})
    for step in range(2):
        await local.train(step, metas[step])
    (await local.snapshot()).write(tmp_path)

    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bit_equal(weights(whole), dict(named_weights(peft_model)))
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    ids_BT = torch.arange(3, 23)[None]
    alone = peft.PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter").eval()
    assert torch.equal(alone(ids_BT).logits, adapter_of(peft_model).model(ids_BT).logits)

    restored = trainer(adapted(family, stirred=False), plane, optimizer={"lr": 1e-2})
    await restored.train(7, metas[3])
    await restored.load_checkpoint(tmp_path)
    for step in range(2, 4):
        one, two = await local.train(step, metas[step]), await restored.train(step, metas[step])
        assert comparable(one.metrics, same_partition=True) == comparable(two.metrics, same_partition=True)
    await local.close()
    await restored.close()


async def test_an_adapter_to_start_from_is_what_training_goes_on_with(tmp_path: Path) -> None:
    first = adapted()
    adapter_of(first).save(tmp_path)
    second = attach_lora(tiny_model(), LoraConfig(path=str(tmp_path)))
    assert bit_equal(dict(named_weights(second)), dict(named_weights(first)))
    plane = data_plane()
    local = trainer(second, plane)
    assert (await local.train(0, put_groups(plane, 2))).updated
    await local.close()
    assert relative_difference(dict(named_weights(second)), dict(named_weights(first))) > 0


@pytest.mark.parametrize(
    ("other", "message"),
    [({"rank": 8, "alpha": 8}, r"model\.lora\.rank was 4, and is 8"), ({"alpha": 16}, r"model\.lora\.alpha was 8")],
)
async def test_a_checkpoint_of_another_adapter_is_refused_by_name(
    other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    local = trainer(adapted(), data_plane())
    (await local.snapshot()).write(tmp_path)
    await local.close()
    peft_model = attach_lora(tiny_model(), LoraConfig.model_validate({"rank": 4, **other}))
    before, second = weights(peft_model), trainer(peft_model, data_plane())
    with pytest.raises(SetupError, match=message):
        await second.load_checkpoint(tmp_path)
    assert bit_equal(before, weights(peft_model))
    await second.close()


# Settings


def test_a_fresh_adapter_is_the_seeds_and_takes_nothing_from_torchs_generator() -> None:
    torch.manual_seed(0)
    drawn = torch.rand(2)
    torch.manual_seed(0)
    first, second = (attach_lora(tiny_model(seed=0), LoraConfig(), seed=5) for _ in range(2))
    other = attach_lora(tiny_model(seed=0), LoraConfig(), seed=6)
    assert bit_equal(weights(first), weights(second))
    assert not bit_equal(weights(first), weights(other))
    torch.manual_seed(0)
    model = tiny_model(seed=0)
    torch.manual_seed(0)
    attach_lora(model, LoraConfig())
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "qkv_proj"],
            r"model\.lora\.target_modules: 'qkv_proj' names no layer .* q_proj, .*or use all-linear",
        ),
        (["lm_head"], r"'lm_head' is an embedding or the head"),
        (["embed_tokens"], r"'embed_tokens' is an embedding or the head"),
        (["input_layernorm"], r"'input_layernorm' is not a linear layer"),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused(targets: list[str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        attach_lora(tiny_model(), LoraConfig(target_modules=targets))


@pytest.mark.parametrize("targets", ["q_proj", [], [""], 3])
def test_targets_are_a_list_of_names_or_all_linear(targets: Any) -> None:
    with pytest.raises(ValueError, match="use all-linear, or a list of names"):
        LoraConfig(target_modules=targets)


def test_without_peft_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SetupError, match=r"model\.lora: needs the peft package.*pip install 'peft>=0\.21'"):
        attach_lora(tiny_model(), LoraConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"model\.lora\.path: .* of type IA3, not LORA"),
        ({"use_dora": True}, r"model\.lora\.path: .* sets use_dora; only plain LoRA"),
        (None, r"holds no adapter: adapter_config\.json cannot be read"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(
    changes: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    adapter_of(adapted()).save(tmp_path)
    settings = tmp_path / "adapter_config.json"
    if changes is None:
        settings.unlink()
    else:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    with pytest.raises(SetupError, match=message):
        attach_lora(tiny_model(), LoraConfig(path=str(tmp_path)))


def test_frozen_weights_count_two_thirds() -> None:
    """Torch counts full attention matrices where the causal half is enough: twice our attention share."""
    from torch.utils.flop_counter import FlopCounterMode

    peft_model, length, rows = adapted(), 40, 3
    model = adapter_of(peft_model).model
    model.set_attn_implementation("eager")
    counter = FlopCounter.of(peft_model)
    with FlopCounterMode(display=False) as torch_counter:
        model(input_ids=torch.randint(3, 100, (rows, length)), use_cache=False).logits.sum().backward()
    ours = counter.training([length] * rows, rows * length)
    attention = 6 * counter.attention_width * rows * length**2
    assert ours + attention == pytest.approx(torch_counter.get_total_flops(), rel=0.05)
    full = FlopCounter.of(tiny_model()).training([length] * rows, rows * length)
    assert ours < full


def _saved_adapter(folder: Path) -> Path:
    """An adapter of the tiny model as peft writes it."""
    adapted = attach_lora(tiny_model("qwen3"), LoraConfig(rank=2, alpha=4))
    adapter = LoraAdapter.of(adapted)
    assert adapter is not None
    adapter.save(folder)
    return folder


@pytest.mark.parametrize("change", ["less", "more"])
def test_a_start_that_does_not_fit_the_model_is_refused(tmp_path: Path, change: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = _saved_adapter(tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    if change == "less":
        tensors = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    else:
        first = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
        tensors |= {name.replace("layers.0", "layers.7"): tensor.clone() for name, tensor in first.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(SetupError, match=r"model\.lora\.path: .* does not fit"):
        attach_lora(tiny_model("qwen3"), LoraConfig(path=str(folder)))


@pytest.mark.parametrize("setting", [{"init_lora_weights": "pissa"}, {"use_dora": True}, {"use_qalora": True}])
def test_a_start_that_would_change_the_base_is_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    folder = _saved_adapter(tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | setting))
    with pytest.raises(SetupError, match=next(iter(setting))):
        attach_lora(tiny_model("qwen3"), LoraConfig(path=str(folder)))

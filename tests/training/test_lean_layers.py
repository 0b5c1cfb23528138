"""The lean body gives the hidden states and gradients of the model's own modules, or stands aside."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from penstock.config.sections.model import LoraConfig
from penstock.training.backends.local.lean import body as lean_module
from penstock.training.backends.local.lean.body import LeanBody, lean_body
from penstock.training.backends.local.policy import Policy
from penstock.training.batching import Microbatch
from penstock.weights.lora import attach_lora
from tests.support.tiny_models import tiny_model
from tests.training.support import without_float32_islands

Grads = dict[str, Tensor]


def qwen2(**settings: Any) -> Any:
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes | heads | settings)).eval()


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "llama_biases": lambda: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "llama_untied": lambda: tiny_model("llama", tied=False),
    "llama_long_rope": lambda: tiny_model(
        "llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    ),
    "mistral": lambda: tiny_model("mistral"),
    "mistral_one_group": lambda: tiny_model("mistral", num_key_value_heads=1),
    "qwen2": qwen2,
    "qwen3": lambda: tiny_model("qwen3"),
    "qwen3_full_heads": lambda: tiny_model("qwen3", num_key_value_heads=4),
    "qwen3_untied": lambda: tiny_model("qwen3", tied=False),
    "qwen3_biases": lambda: tiny_model("qwen3", hidden=48, attention_bias=True),
    "qwen3_wide_heads": lambda: tiny_model("qwen3", head_dim=16),
}


def stirred(name: str) -> Any:
    """A model whose norms and biases are not what they begin as."""
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def ids(rows: int = 3, length: int = 13, seed: int = 0) -> Tensor:
    return torch.randint(2, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def own(model: Any, ids_BL: Tensor) -> Tensor:
    hidden_BLH = model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    assert isinstance(hidden_BLH, Tensor)
    return hidden_BLH


def grads(model: Any, hidden_BLH: Tensor) -> Grads:
    """Of a loss that goes through the head too, so that tied embeddings get both their gradients."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    logits_BLV = model.get_output_embeddings()(hidden_BLH)
    wanted_BLV = torch.randn(logits_BLV.shape, dtype=logits_BLV.dtype, generator=torch.Generator().manual_seed(1))
    return dict(zip(names, torch.autograd.grad((logits_BLV * wanted_BLV).sum(), parameters), strict=True))


def assert_close(found: Grads, expected: Grads, limit: float) -> None:
    """Each tensor within `limit` of the other, relative to its largest element; one token leaves some at 0."""
    assert found.keys() == expected.keys()
    for name, expected_grad in expected.items():
        scale = max(1e-3, float(expected_grad.abs().max()))
        torch.testing.assert_close(
            found[name], expected_grad, rtol=0, atol=limit * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def everywhere(lean: LeanBody, ids_BL: Tensor) -> Tensor:
    """The lean body's states at all places."""
    return lean(ids_BL, torch.arange(ids_BL.numel())).view(*ids_BL.shape, -1)


def lean_of(model: Any) -> LeanBody:
    lean = lean_body(model.base_model, 32)
    assert lean is not None
    return lean


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_gradients_are_exactly_those_of_the_modules(name: str) -> None:
    model = without_float32_islands(stirred(name).double())
    lean = LeanBody(model.base_model)
    expected_BLH, found_BLH = own(model, ids()), everywhere(lean, ids())
    torch.testing.assert_close(found_BLH, expected_BLH, rtol=1e-10, atol=1e-10)
    assert_close(grads(model, found_BLH), grads(model, expected_BLH), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_only_rounding_differs(name: str) -> None:
    model = stirred(name)
    expected_BLH, found_BLH = own(model, ids()), everywhere(lean_of(model), ids())
    torch.testing.assert_close(found_BLH, expected_BLH, rtol=1e-4, atol=1e-5)
    assert_close(grads(model, found_BLH), grads(model, expected_BLH), 2e-5)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (5, 1), (1, 2), (7, 40)])
def test_any_shape(rows: int, length: int) -> None:
    model = without_float32_islands(stirred("qwen3").double())
    lean, ids_BL = LeanBody(model.base_model), ids(rows, length)
    assert_close(grads(model, everywhere(lean, ids_BL)), grads(model, own(model, ids_BL)), 1e-10)


def test_backward_accumulates_into_the_parameters() -> None:
    model = stirred("qwen3")
    lean = lean_of(model)
    hidden_BLH = everywhere(lean, ids())
    expected = torch.autograd.grad(hidden_BLH.square().sum(), list(model.model.parameters()), retain_graph=True)
    hidden_BLH.square().sum().backward(retain_graph=True)
    hidden_BLH.square().sum().backward()
    for parameter, grad in zip(model.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)


def test_weights_that_are_changed_in_place_are_read_anew() -> None:
    model = stirred("qwen3")
    lean = lean_of(model)
    before_BLH = everywhere(lean, ids())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert not torch.allclose(everywhere(lean, ids()), before_BLH, rtol=1e-3)
    torch.testing.assert_close(everywhere(lean, ids()), own(model, ids()), rtol=1e-4, atol=1e-5)


def test_passes_at_the_same_time_give_what_each_gives_alone() -> None:
    model = stirred("qwen3")
    lean = lean_of(model)
    alone = [grads(model, everywhere(lean, ids(seed=seed))) for seed in range(2)]
    together: list[list[Grads]] = [[], []]
    start = threading.Barrier(2)

    def passes(lane: int) -> None:
        start.wait()
        together[lane] = [grads(model, everywhere(lean, ids(seed=lane))) for _ in range(10)]

    threads = [threading.Thread(target=passes, args=(lane,)) for lane in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, found in zip(alone, together, strict=True):
        assert len(found) == 10
        assert all(torch.equal(one[name], expected[name]) for one in found for name in expected)


def frozen_in_part() -> Any:
    model = tiny_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    return model


def with_a_hook() -> Any:
    model = tiny_model()
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: None)
    return model


def checkpointed() -> Any:
    model = tiny_model()
    model.gradient_checkpointing_enable()
    return model


def with_another_linear() -> Any:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = tiny_model()
    model.model.layers[0].mlp.down_proj = Doubled(64, 32, bias=False).eval()
    return model


OTHERS = {
    "moe": lambda: tiny_model("qwen3_moe"),
    "gemma": lambda: tiny_model("gemma3"),
    "granite": lambda: tiny_model("granite"),
    "float64": lambda: tiny_model().double(),
    "bfloat16": lambda: tiny_model().bfloat16(),
    "eager": lambda: tiny_model(attn_implementation="eager"),
    "activation": lambda: tiny_model(hidden_act="gelu"),
    "training": lambda: tiny_model(attention_dropout=0.1).train(),
    "lora": lambda: attach_lora(tiny_model(), LoraConfig(rank=4, alpha=8), seed=3),
    "frozen": frozen_in_part,
    "hook": with_a_hook,
    "checkpointing": checkpointed,
    "linear": with_another_linear,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_take_their_own_way(name: str) -> None:
    model = OTHERS[name]()
    assert lean_body(model.get_base_model().base_model if name == "lora" else model.base_model, 8) is None


def test_a_model_that_gives_other_numbers_takes_its_own_way_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert lean_body(tiny_model().model, 32) is not None
    assert not caplog.messages
    monkeypatch.setattr(lean_module.Setting, "of", lambda *args, of=lean_module.Setting.of: of(*args[:-1], 0.5))
    assert lean_body(tiny_model().model, 32) is None
    assert caplog.messages == ["the lean layers differ from those of Qwen3Model, which are used: slower, but right"]


def policy(model: Any, longest_row: int | None = 32, **settings: Any) -> Policy:
    options = {"gradient_checkpointing": False, "longest_row": longest_row} | settings
    return Policy(model, temperature=1.0, chunk_tokens=64, **options)


def microbatch(length: int, *, packed: bool = False) -> Microbatch:
    ids_BL = ids(1, length)
    positions_BL = torch.arange(length)[None] if packed else None
    every_T = torch.arange(length - 1)
    return Microbatch(ids_BL, positions_BL, every_T, every_T + 1, ids_BL[0, 1:])


def lean_passes(
    policy: Policy, batch: Microbatch, monkeypatch: pytest.MonkeyPatch, asked: Any = Policy.logprobs
) -> int:
    """How many lean bodies a pass over a microbatch calls."""
    calls: list[Tensor] = []

    def spy(lean: LeanBody, ids_BL: Tensor, predictors_N: Tensor, call: Any = LeanBody.__call__) -> Tensor:
        calls.append(ids_BL)
        hidden_NH = call(lean, ids_BL, predictors_N)
        assert isinstance(hidden_NH, Tensor)
        return hidden_NH

    with monkeypatch.context() as patch:
        patch.setattr(LeanBody, "__call__", spy)
        asked(policy, batch)
    return len(calls)


def test_the_policy_takes_the_lean_way_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lean_passes(policy(tiny_model()), microbatch(20), monkeypatch) == 1
    assert lean_passes(policy(tiny_model()), microbatch(20, packed=True), monkeypatch) == 0
    assert lean_passes(policy(tiny_model(), gradient_checkpointing=True), microbatch(20), monkeypatch) == 0
    assert lean_passes(policy(tiny_model(hidden=520)), microbatch(20), monkeypatch) == 0


@pytest.mark.parametrize(("family", "limit"), [("qwen3", 256), ("mistral_window", 8)])
def test_all_rows_take_one_way_by_the_longest_there_may_be(
    family: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lean_passes(policy(tiny_model(family), limit), microbatch(8), monkeypatch) == 1
    assert lean_passes(policy(tiny_model(family), limit), microbatch(limit + 1), monkeypatch) == 0
    assert lean_passes(policy(tiny_model(family), limit + 1), microbatch(8), monkeypatch) == 0
    assert lean_passes(policy(tiny_model(family), None), microbatch(8), monkeypatch) == 0


def test_norms_of_another_make_are_left_to_the_model() -> None:
    model = tiny_model()
    model.model.norm = torch.nn.RMSNorm(32)
    assert lean_body(model.model.eval(), 8) is None


def test_the_reference_takes_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    both = policy(model, keep_reference=True)
    assert lean_passes(both, microbatch(20), monkeypatch, Policy.reference_logprobs) == 1
    expected_T, _ = both.logprobs(microbatch(20))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found_T, _ = both.reference_logprobs(microbatch(20))
    assert torch.equal(found_T, expected_T)
    assert not found_T.requires_grad

from __future__ import annotations

import pytest
import torch

from penstock.training.flops import FlopCounter, peak_tflops
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("tied", [True, False])
def test_counts_what_torch_counts(tied: bool) -> None:
    """Torch counts full attention matrices where the causal half is enough: twice our attention share."""
    from torch.utils.flop_counter import FlopCounterMode

    model, length, rows = tiny_model(tied=tied), 40, 3
    model.set_attn_implementation("eager")
    counter = FlopCounter.of(model)
    with FlopCounterMode(display=False) as torch_counter:
        model(input_ids=torch.randint(3, 100, (rows, length)), use_cache=False).logits.sum().backward()
    ours = counter.training([length] * rows, rows * length)
    attention = 6 * counter.attention_width * rows * length**2
    assert ours + attention == pytest.approx(torch_counter.get_total_flops(), rel=0.01)


def test_a_token_meets_only_the_experts_it_is_routed_to() -> None:
    model = tiny_model("qwen3_moe")
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
    embedding = model.get_input_embeddings().weight.numel()
    assert experts > 0
    assert FlopCounter.of(model).body_parameters == others - embedding + experts / 2


def test_no_peak_is_claimed_for_a_cpu() -> None:
    assert peak_tflops(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA L40", None)],
)
def test_peaks_go_by_whole_words_of_the_devices_name(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda"), torch.bfloat16) == peak

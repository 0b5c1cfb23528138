from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.config.sections.training import OptimizerConfig
from penstock.errors import SetupError
from penstock.training.backends.local.optimizer import PolicyOptimizer


class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
        self.unused = nn.Parameter(torch.tensor([5.0], dtype=dtype))


def optimizer(model: nn.Module, **settings: object) -> PolicyOptimizer:
    return PolicyOptimizer(model, OptimizerConfig.model_validate({"lr": 0.1, **settings}), None)


def test_clipping_bounds_the_global_norm_and_reports_the_true_one() -> None:
    """With betas 0 and a large epsilon the update is lr * g / eps: proportional to the clipped gradient."""
    model = Scale()
    adamw = optimizer(model, betas=(0.0, 0.0), eps=1e6, lr=1e6, max_grad_norm=1.0)
    (model.weight * torch.tensor([3.0, 4.0])).sum().backward()
    norm = adamw.gradient_norm()
    assert norm == 5.0
    adamw.step(norm)
    assert model.weight.tolist() == pytest.approx([1 - 0.6, 2 - 0.8], abs=1e-4)


def test_matches_plain_adamw_below_the_clip() -> None:
    model, plain = Scale(), Scale()
    adamw = optimizer(model, weight_decay=0.1, max_grad_norm=100.0)
    reference = torch.optim.AdamW([plain.weight], lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(3):
        for module in (model, plain):
            module.zero_grad()
            (module.weight**2).sum().backward()
        adamw.step(adamw.gradient_norm())
        reference.step()
    assert torch.equal(model.weight, plain.weight)
    assert model.unused.tolist() == [5.0]
    assert adamw.step_counts() == {"weight": 3}


def test_updates_below_bf16_resolution_are_not_lost() -> None:
    """A bf16 number near 1 moves in steps of 1/128; a hundred updates of 1/1000 must still add up."""
    model = Scale(torch.bfloat16)
    adamw = optimizer(model, lr=1e-3)
    for _ in range(100):
        adamw.zero_gradients()
        (model.weight * 1.0).sum().backward()
        adamw.step(adamw.gradient_norm())
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.float().tolist() == pytest.approx([0.9, 1.9], abs=0.01)


def test_bf16_gradients_accumulate_in_float32() -> None:
    model = Scale(torch.bfloat16)
    adamw = optimizer(model)
    for value in (256.0, *[1.0] * 8):
        (model.weight * value).sum().backward()
    assert model.weight.grad is None
    assert adamw.gradient_norm() == pytest.approx(264 * 2**0.5)
    adamw.zero_gradients()
    assert adamw.gradient_norm() == 0


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(SetupError, match="requires a gradient"):
        optimizer(Scale().requires_grad_(False))

"""AdamW over a model's parameters: accumulation, one rescale, clipping, the schedule, and its state by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.config.sections.training import OptimizerConfig
from penstock.errors import SetupError
from penstock.training.schedule import learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq")


class PolicyOptimizer:
    """Owns the gradients of a step and the optimizer's state.

    Parameters of less than 32 bits have a float32 master copy, which gradients accumulate into and which the optimizer
    changes: neither sums over microbatches nor small updates are lost to rounding. The others are their own master.

    Invariants: outside a step there are no gradients; `updates` alone sets the schedule. It counts optimizer steps, or
    batches if a batch has several.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, max_steps: int | None) -> None:
        self._config = config
        self._max_steps = max_steps
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise SetupError(f"{type(model).__name__} has no parameter that requires a gradient")
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._adamw = torch.optim.AdamW(
            self._masters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.updates = 0

    @property
    def next_learning_rate(self) -> float:
        """The rate that the next `step` will use."""
        return learning_rate(self._config, self.updates, self._max_steps)

    def zero_gradients(self) -> None:
        """Drop all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What is trained."""
        return tuple(self._parameters.values())

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Accumulate gradients of `parameters` that were computed separately, as a backward pass would."""
        for master, gradient in zip(self._masters.values(), gradients, strict=True):
            if gradient is not None:
                gradient = gradient.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def gradients(self) -> dict[str, Tensor]:
        """What has been accumulated so far, by parameter name; those without a gradient are left out."""
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for gradient in self._gradients():
            gradient.mul_(factor)

    def gradient_norm(self) -> float:
        """Global norm of all gradients."""
        return float(torch.nn.utils.get_total_norm(list(self._gradients())))

    def step(self, gradient_norm: float, *, advance: bool = True) -> float:
        """Clip by the global norm, change the weights, advance the schedule; returns the learning rate used."""
        rate = self.next_learning_rate
        limit = self._config.max_grad_norm
        if gradient_norm > limit:
            self.scale_gradients(limit / (gradient_norm + 1e-6))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
        self.updates += advance
        return rate

    def tensors(self) -> Iterator[Tensor]:
        """Master copies, gradients and moments: what lies on the device in addition to the model."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                yield master
            if master.grad is not None:
                yield master.grad
            yield from self._adamw.state.get(master, {}).values()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and master copies, as `moment.parameter name`."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                tensors[f"master.{name}"] = master.detach()
            state = self._adamw.state.get(master, {})
            tensors |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS if state}
        return tensors

    def step_counts(self) -> dict[str, int]:
        """How often each parameter was changed; parameters that never had a gradient are left out."""
        states = {name: self._adamw.state.get(master, {}) for name, master in self._masters.items()}
        return {name: int(state["step"]) for name, state in states.items() if state}

    def bytes_to_come(self) -> int:
        """Bytes of the moments of parameters that were never changed."""
        fresh = (master for master in self._masters.values() if not self._adamw.state.get(master))
        return sum(len(_MOMENTS) * master.numel() * master.element_size() for master in fresh)

    def problems(self, tensors: Mapping[str, Tensor], counts: Mapping[str, int]) -> list[str]:
        """Reasons why a saved state cannot be loaded into this optimizer."""
        expected = {
            f"{moment}.{name}": self._masters[name] for name in counts if name in self._masters for moment in _MOMENTS
        }
        expected |= {f"master.{name}": m for name, m in self._masters.items() if m is not self._parameters[name]}
        found = [f"{name} is not a parameter of the model" for name in counts if name not in self._masters]
        found += [f"{key} is missing" for key in expected if key not in tensors]
        found += [f"{key} is not known" for key in tensors if key not in expected]
        found += [
            f"{key} has shape {tuple(tensors[key].shape)}, the model {tuple(like.shape)}"
            for key, like in expected.items()
            if key in tensors and tensors[key].shape != like.shape
        ]
        return found

    def load(self, tensors: Mapping[str, Tensor], counts: Mapping[str, int], updates: int) -> None:
        """Load a saved state; the model's own weights are already loaded."""
        self.zero_gradients()
        self._adamw.state.clear()
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(tensors[f"master.{name}"])
                if name in counts:
                    moments = {key: tensors[f"{key}.{name}"].to(master.device, copy=True) for key in _MOMENTS}
                    count = torch.tensor(float(counts[name]), dtype=torch.float32, device=master.device)
                    self._adamw.state[master] = {"step": count, **moments}
        self.updates = updates

    def _gradients(self) -> Iterator[Tensor]:
        for master in self._masters.values():
            if master.grad is not None:
                yield master.grad


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    master = parameter.detach().to(torch.float32, copy=True)
    parameter.register_post_accumulate_grad_hook(_accumulate_into(master))  # type: ignore[no-untyped-call]
    return master


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(torch.float32)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move

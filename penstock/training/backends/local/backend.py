"""`LocalBackend`: one torch module and its optimizer, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.losses import LossSum
from penstock.algorithms.reduction import MetricParts
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.config.sections.training import TrainingConfig
from penstock.runtime.lanes import Lanes
from penstock.training.backends.base import Backend, MicrobatchRows, Objective, Pass
from penstock.training.backends.local.checkpointing import LocalSnapshot, load_trainer
from penstock.training.backends.local.optimizer import PolicyOptimizer
from penstock.training.backends.local.policy import Policy
from penstock.training.batching import Microbatch, build_microbatch
from penstock.training.flops import FlopCounter, peak_tflops
from penstock.training.packing import Batching, PlanRule
from penstock.training.targets import uses_reference
from penstock.weights.policy_weights import PolicyWeights
from penstock.weights.publication import WeightPublication, WeightSite
from penstock.weights.publisher import WeightPublisher


class LocalBackend(Backend):
    """The `Backend` of a single rank.

    Several lanes compute microbatches at the same time. Their gradients are then kept apart and added in the order of
    the microbatches, so the sums do not depend on which lane was faster.

    `longest_row` is the most tokens a row can have, if known.
    """

    def __init__(
        self,
        model: Any,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        *,
        temperature: float,
        lanes: Lanes | None = None,
        longest_row: int | None = None,
    ) -> None:
        self._lanes = lanes or Lanes("trainer")
        self._model = model
        self._batching = Batching(training.batching)
        self._max_tokens = training.max_tokens_per_microbatch
        self._policy = Policy(
            model,
            temperature=temperature,
            chunk_tokens=training.logprob_chunk_tokens,
            gradient_checkpointing=training.gradient_checkpointing,
            entropy_gradient=algorithm.entropy_coefficient > 0,
            keep_reference=uses_reference(algorithm),
            longest_row=longest_row if self._batching is Batching.PADDED else None,
        )
        if self._batching is Batching.PACKED:
            self._policy.check_packing()
        self._optimizer = PolicyOptimizer(model, training.optimizer, training.max_steps)
        self._flops = FlopCounter.of(model)
        self._home = self._policy.device
        self._publisher = WeightPublisher()

    @property
    def ranks(self) -> int:
        return 1

    @property
    def plan_rule(self) -> PlanRule:
        return PlanRule(self._max_tokens, self._batching, self._lanes.count, self._policy.padding_cost)

    @property
    def flops(self) -> FlopCounter:
        return self._flops

    @property
    def peak_tflops(self) -> float | None:
        return peak_tflops(self._policy.device, self._model.dtype)

    @property
    def logprob_dtype(self) -> torch.dtype:
        return self._policy.exact_dtype

    def begin(self) -> None:
        self._optimizer.zero_gradients()

    def run(
        self, microbatches: Sequence[MicrobatchRows], objective: Objective | None, *, reference: bool = False
    ) -> Sequence[Pass]:
        if objective is None:
            found = list(self._lanes.map(lambda each: self._logprobs(each, reference=reference), microbatches))
        else:
            found = self._train(microbatches, objective)
        self._wait_for_device()
        return found

    def _train(self, microbatches: Sequence[MicrobatchRows], objective: Objective) -> list[Pass]:
        apart = self._lanes.count > 1 and len(microbatches) > 1
        found: list[Pass] = []
        for done, gradients in self._lanes.map(
            lambda each: self._forward_backward(each, objective, apart=apart), microbatches
        ):
            if gradients:
                self._optimizer.add_gradients(gradients)
            found.append(done)
        return found

    def _forward_backward(
        self, rows: MicrobatchRows, objective: Objective, *, apart: bool
    ) -> tuple[Pass, tuple[Tensor | None, ...]]:
        """One microbatch; with `apart` its gradients are returned, not accumulated, so lanes do not mix."""
        microbatch = self._laid_out(rows)
        logprobs_T, entropy_T = self._policy.logprobs(microbatch)
        loss = objective(logprobs_T, entropy_T, microbatch.sources_T)
        gradients: tuple[Tensor | None, ...] = ()
        if apart:
            gradients = torch.autograd.grad(loss.total, self._optimizer.parameters, allow_unused=True)
        else:
            loss.total.backward()  # type: ignore[no-untyped-call]
        metrics = {name: replace(metric, value=metric.value.detach()) for name, metric in loss.metrics.items()}
        detached = LossSum(loss.total.detach(), metrics)
        return Pass(microbatch.sources_T, logprobs_T.detach(), detached), gradients

    @torch.no_grad()
    def _logprobs(self, rows: MicrobatchRows, *, reference: bool) -> Pass:
        microbatch = self._laid_out(rows)
        policy = self._policy.reference_logprobs if reference else self._policy.logprobs
        return Pass(microbatch.sources_T, policy(microbatch)[0])

    def _laid_out(self, rows: MicrobatchRows) -> Microbatch:
        return build_microbatch(rows.rows, rows.indices, self._batching, rows.wanted_S).to(self._policy.device)

    def reduce(self, measured: MetricParts) -> MetricParts:
        return measured

    def scale(self, factor: float) -> None:
        self._optimizer.scale_gradients(factor)

    def norm(self) -> float:
        return self._optimizer.gradient_norm()

    def step(self, norm: float) -> float:
        rate = self._optimizer.step(norm, advance=False)
        self._wait_for_device()
        return rate

    def advance(self) -> None:
        self._optimizer.updates += 1

    def drop(self) -> None:
        self._optimizer.zero_gradients()

    def gradients(self) -> Mapping[str, Tensor]:
        return self._optimizer.gradients()

    def publish(self, version: int, sites: Sequence[WeightSite]) -> WeightPublication:
        return self._publisher.publish(version, PolicyWeights.of(self._model), sites)

    def release(self, publication: WeightPublication, *, still_read: bool) -> None:
        self._publisher.release(publication, still_read=still_read)

    def save(self, version: int) -> LocalSnapshot:
        return LocalSnapshot.of(self._model, self._optimizer, version)

    def load(self, folder: Path) -> int:
        return load_trainer(folder, self._model, self._optimizer).version

    def offload(self) -> None:
        self._move(torch.device("cpu"))
        if self._home.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self._home)

    def _move(self, device: torch.device) -> None:
        """Tensors keep their identity, because the optimizer and captured passes refer to them by it."""
        self._wait_for_device()
        for tensor in (*self._policy.tensors(), *self._optimizer.tensors()):
            tensor.data = tensor.data.to(device)

    def teardown(self) -> None:
        self._lanes.close()
        self._publisher.close()

    def _wait_for_device(self) -> None:
        """Timings are the device's, and its errors surface in the call that caused them."""
        if self._policy.device.type == "cuda":
            torch.cuda.current_stream(self._policy.device).synchronize()

"""A step over several ranks: each counts its own rows, and together they make the step of the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from penstock.algorithms.reduction import MetricParts, merge_metrics
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane.fields import ADVANTAGE, REFERENCE_LOGPROBS, VALID_TOKENS
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import DataPlaneError
from penstock.training.backends.base import Pass
from penstock.training.backends.local import LocalBackend
from penstock.training.interface import StepResult
from penstock.training.step_worker import StepWorker
from penstock.training.workers.local import local_worker
from tests.support.tiny_models import tiny_model
from tests.training.support import (
    algorithm,
    bit_equal,
    chunks,
    comparable,
    data_plane,
    put_groups,
    relative_difference,
    training,
    weights,
)

T = TypeVar("T")
RANKS = 2
WAIT_SECONDS = 60.0


class Ranks:
    """What ranks in threads of one process exchange: each hands in a value, and all get the values of all."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._handed_in: list[Any] = [None] * RANKS

    def exchange(self, rank: int, value: T) -> list[T]:
        self._handed_in[rank] = value
        self._barrier.wait(WAIT_SECONDS)
        found = list(self._handed_in)
        self._barrier.wait(WAIT_SECONDS)
        return found


class RankBackend(LocalBackend):
    """Data parallel in the plainest form: the same model on every rank, gradients summed when they are scaled."""

    def __init__(self, ranks: Ranks, rank: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks, self._rank = ranks, rank

    @property
    def ranks(self) -> int:
        return RANKS

    def reduce(self, measured: MetricParts) -> MetricParts:
        return merge_metrics(self._ranks.exchange(self._rank, measured))

    def scale(self, factor: float) -> None:
        super().scale(factor)
        own = {name: gradient.clone() for name, gradient in self.gradients().items()}
        everywhere = self._ranks.exchange(self._rank, own)
        for name, parameter in self._model.named_parameters():
            found = [gradients[name] for gradients in everywhere if name in gradients]
            parameter.grad = torch.stack(found).sum(0) if found else None


def model() -> Any:
    return tiny_model().double()


def on_ranks(work: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


def step_of_ranks(
    models: Sequence[Any], plane: Any, shares: Sequence[Sequence[KVBatchMeta]], **settings: Any
) -> tuple[list[StepResult], list[StepWorker]]:
    ranks, rules, config = Ranks(), settings.pop("rules"), training(**settings)
    workers = [
        StepWorker(RankBackend(ranks, rank, models[rank], rules, config, temperature=1.0), plane, rules, config)
        for rank in range(RANKS)
    ]
    return on_ranks(lambda rank: workers[rank].train(0, shares[rank])), workers


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("split", [3, 5], ids=["uneven", "one rank without rows"])
def test_ranks_make_the_step_of_the_whole_batch(aggregation: str, split: int) -> None:
    plane, rules = data_plane(), algorithm(aggregation)
    metas = put_groups(plane, 5)
    alone = model()
    whole = local_worker(alone, plane, rules, training(), temperature=1.0).train(0, chunks(metas, 1))
    models = [model() for _ in range(RANKS)]
    results, _ = step_of_ranks(models, plane, [metas[:split], metas[split:]], rules=rules)
    expected = comparable(whole.metrics) | {"ranks": 2.0}
    for result, trained in zip(results, models, strict=True):
        assert (result.updated, result.version) == (True, 1)
        found = comparable(result.metrics)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-14), name
        assert relative_difference(weights(alone), weights(trained)) <= 1e-12


def test_a_rank_whose_rows_differ_from_their_metadata_refuses_them() -> None:
    """It cannot plan them anew by itself: the other ranks would run another number of passes."""
    plane, rules, config = data_plane(), algorithm(), training()
    (meta,) = put_groups(plane, 1)
    worker = StepWorker(RankBackend(Ranks(), 0, model(), rules, config, temperature=1.0), plane, rules, config)
    worker.begin(0)
    with pytest.raises(DataPlaneError, match=r"'p0_g0' is .*is_trained=True.* says .*is_trained=False.* valid_tokens"):
        worker.microbatch(0, meta.tag_rows(VALID_TOKENS, [0, 1, 1, 1]))


def test_one_ranks_bad_loss_is_skipped_by_all_and_names_its_group() -> None:
    plane, rules = data_plane(), algorithm()
    metas = put_groups(plane, 2)
    plane.put_samples(metas[1].sample_ids, {ADVANTAGE: torch.full((4,), float("inf"))}, metas[1].partition_id)
    models = [model() for _ in range(RANKS)]
    before = weights(models[0])
    results, workers = step_of_ranks(models, plane, [metas[:1], metas[1:]], rules=rules, nonfinite="skip")
    assert [(result.updated, worker.version) for result, worker in zip(results, workers, strict=True)] == [
        (False, 0),
        (False, 0),
    ]
    assert [result.nonfinite_groups for result in results] == [(), metas[1].group_ids]
    assert all(relative_difference(before, weights(trained)) == 0 for trained in models)


def test_a_pass_holds_on_to_no_graph() -> None:
    """All passes of a chunk are held at once: with their graphs, so would be their activations."""
    plane, rules, config = data_plane(), algorithm(), training()
    kept: list[Pass] = []

    class Kept(LocalBackend):
        def run(self, *args: Any, **kwargs: Any) -> Sequence[Pass]:
            found = super().run(*args, **kwargs)
            kept.extend(found)
            return found

    StepWorker(Kept(model(), rules, config, temperature=1.0), plane, rules, config).train(0, put_groups(plane, 2))
    losses = [done.loss for done in kept if done.loss is not None]
    assert len(losses) == 2
    tensors = [done.logprobs_T for done in kept] + [loss.total for loss in losses]
    tensors += [metric.value for loss in losses for metric in loss.metrics.values()]
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize("kl", [0.0, 0.1], ids=["policy", "policy and reference"])
def test_a_worker_that_was_offloaded_in_the_middle_of_a_step_goes_on_as_if_it_never_was(kl: float) -> None:
    assert_offloading_changes_nothing(torch.device("cpu"), algorithm(kl={"coefficient": kl}))


def assert_offloading_changes_nothing(device: torch.device, rules: AlgorithmConfig) -> None:
    """Five times between two chunks of each of two steps, with moments from the first in the second."""
    trained = []
    for cycles in (0, 5):
        plane, network = data_plane(REFERENCE_LOGPROBS), model().to(device)
        worker = local_worker(network, plane, rules, training(), temperature=1.0)
        for step in range(2):
            worker.begin(step)
            for meta in put_groups(plane, 2, name=f"s{step}p"):
                worker.microbatch(step, worker.prepare(meta).meta)
                for _ in range(cycles):
                    worker.offload()
                    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}
                    worker.onload()
            assert worker.finish(step).updated
        assert all(parameter.device.type == device.type for parameter in network.parameters())
        trained.append(weights(network))
    assert bit_equal(*trained)

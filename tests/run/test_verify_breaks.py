"""`penstock verify` finds what is broken: exactly that row fails, and the exit code is 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.algorithms.losses import LossSum
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.client import SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.meta import KVBatchMeta, Tags
from penstock.data_plane.opening import ADAPTERS
from penstock.rollout.engines.base import GenerationRequest, GenerationResult
from penstock.rollout.engines.embedded import EmbeddedEngine, weight_update
from penstock.run.verify.memory import estimate_memory
from penstock.training import step_worker
from penstock.training.interface import ChunkResult
from penstock.training.step_worker import StepWorker
from penstock.weights.hf import named_weights
from penstock.weights.publication import WeightPublication
from tests.run.conftest import ConfigMaker
from tests.run.verifying import Verified, Verify, verify

__all__ = ["verify"]


def only_fails(verified: Verified, key: str) -> dict[str, Any]:
    """The row that is the only one to fail."""
    assert verified.exit_code == 1
    assert verified.content["ok"] is False
    assert verified.with_status("fail") == [key]
    assert verified.checks[key]["explanation"]
    return verified.checks[key]


class TestCutOff:
    def test_bounds_that_leave_every_token_out(self, verify: Verify) -> None:
        verified = verify(**{"algorithm.correction": {"kind": "decoupled", "cap": 1e-3}, "rollout.sampling.top_k": 4})
        assert "cut_off_tokens" in verified.with_status("fail")
        row = verified.checks["cut_off_tokens"]
        assert row["figures"]["masked_fraction"] > 0.9
        assert "widen the bounds of algorithm.correction" in row["explanation"]

    def test_bounds_that_leave_out_a_good_part_of_the_tokens_warn(self, verify: Verify) -> None:
        verified = verify(**{"algorithm.correction": {"kind": "icepop", "low": 1.0, "high": 1.0}})
        row = verified.checks["cut_off_tokens"]
        assert 0.05 < row["figures"]["masked_fraction"] < 0.9
        assert (row["status"], verified.exit_code) == ("warn", 0)
        assert "of the tokens are masked by the correction" in row["explanation"]

    @pytest.mark.parametrize(
        "changes",
        [
            {"algorithm.correction": {"kind": "icepop"}},
            {"algorithm.loss": {"kind": "gspo"}, "algorithm.old_policy": "engine"},
        ],
        ids=["icepop", "gspo"],
    )
    def test_truncated_sampling_cuts_nothing_off(self, verify: Verify, changes: dict[str, Any]) -> None:
        verified = verify(**{"rollout.sampling.top_k": 4, **changes})
        assert verified.with_status("fail") == []
        figures = verified.figures("cut_off_tokens")
        assert figures.pop("tokens") > 0
        assert set(figures.values()) == {0.0}


class TestGradients:
    def test_a_loss_that_is_a_mean_over_its_microbatch(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real = step_worker.policy_objective

        def mean_of_its_own(
            algorithm: Any, logprobs_T: Tensor, entropy_T: Tensor, targets: Any, custom: Any
        ) -> LossSum:
            loss = real(algorithm, logprobs_T, entropy_T, targets, custom)
            return LossSum(loss.total / targets.mask_T.sum(), loss.metrics)

        monkeypatch.setattr(step_worker, "policy_objective", mean_of_its_own)
        row = only_fails(verify(), "gradient_parity")
        assert row["figures"]["streamed_relative_difference"] > 0.01
        assert "min_groups_per_chunk" in row["explanation"]

    def test_a_custom_loss_that_depends_on_what_shares_its_microbatch(self, verify: Verify) -> None:
        path = "tests.support.custom_algorithms:over_the_batch"
        verified = verify(**{"algorithm.loss": {"kind": "custom", "import_path": path}})
        assert verified.exit_code == 1
        assert verified.with_status("fail") == ["gradient_parity", "custom_loss"]
        row = verified.checks["custom_loss"]
        assert row["figures"]["relative_difference"] > 0.01
        assert f"The gradient of {path} changes with the responses that share its microbatch" in row["explanation"]
        assert "no mean, deviation or maximum" in row["explanation"]
        assert path in verified.checks["gradient_parity"]["explanation"]

    @pytest.mark.parametrize("name", ["clipped", "RowMean"])
    def test_a_custom_loss_of_single_responses_passes(self, verify: Verify, name: str) -> None:
        path = f"tests.support.custom_algorithms:{name}"
        verified = verify(**{"algorithm.loss": {"kind": "custom", "import_path": path}})
        assert verified.with_status("fail") == []
        assert verified.figures("custom_loss")["relative_difference"] < 1e-12
        assert verified.figures("gradient_parity")["streamed_relative_difference"] < 1e-5

    def test_a_gradient_that_keeps_something_of_the_chunk_before(
        self, verify: Verify, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One tensor of many, off by a thousandth for each further chunk."""
        real = StepWorker.microbatch

        def leaking(self: StepWorker, step_id: int, meta: KVBatchMeta) -> ChunkResult:
            result = real(self, step_id, meta)
            gradient = next(iter(self._backend.gradients().values()))
            gradient.mul_(1.001)
            return result

        monkeypatch.setattr(StepWorker, "microbatch", leaking)
        row = only_fails(verify(), "gradient_parity")
        assert row["figures"]["worst_parameter"] == "model.embed_tokens.weight"

    def test_counts_that_do_not_add_up(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real = StepWorker.microbatch

        def miscounting(self: StepWorker, step_id: int, meta: KVBatchMeta) -> ChunkResult:
            result = real(self, step_id, meta)
            return replace(result, valid_tokens=result.valid_tokens + 1)

        monkeypatch.setattr(StepWorker, "microbatch", miscounting)
        assert only_fails(verify(), "gradient_parity")["figures"]["counts_differ"] == 2

    def test_an_abort_that_changes_weights(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real = StepWorker.abort

        def stepping(self: StepWorker, step_id: int) -> None:
            real(self, step_id)
            weights = dict(named_weights(self._backend._model))
            weights["model.norm.weight"].add_(1e-7)

        monkeypatch.setattr(StepWorker, "abort", stepping)
        verified = verify()
        assert verified.figures("gradient_parity")["weights_changed"] == 1
        assert "gradient_parity" in verified.with_status("fail")

    def test_a_trainer_that_raises_is_a_failed_row_and_the_others_are_made(
        self, verify: Verify, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def raising(self: StepWorker, step_id: int, meta: KVBatchMeta) -> ChunkResult:
            raise RuntimeError("no kernel for this")

        monkeypatch.setattr(StepWorker, "microbatch", raising)
        row = only_fails(verify(), "gradient_parity")
        assert "no kernel for this" in row["error"]
        assert "no kernel for this" in row["explanation"]


class TestLogprobs:
    def test_one_wrong_token_of_an_engine(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real = EmbeddedEngine.generate

        async def lying(self: EmbeddedEngine, request: GenerationRequest) -> GenerationResult:
            result = await real(self, request)
            if request.request_id != "verify0_g0_t0":
                return result
            return replace(result, logprobs=(*result.logprobs[:-1], result.logprobs[-1] - 0.05))

        monkeypatch.setattr(EmbeddedEngine, "generate", lying)
        row = only_fails(verify(), "logprob_mismatch")
        assert row["figures"]["max_abs"] == pytest.approx(0.05, rel=1e-2)
        assert "max_abs" in row["explanation"]

    def test_another_temperature_than_the_trainer_thinks(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real = EmbeddedEngine.generate

        async def hotter(self: EmbeddedEngine, request: GenerationRequest) -> GenerationResult:
            sampling = request.sampling
            if sampling.temperature:
                sampling = replace(sampling, temperature=1.1 * sampling.temperature)
            return await real(self, replace(request, sampling=sampling))

        monkeypatch.setattr(EmbeddedEngine, "generate", hotter)
        assert only_fails(verify(), "logprob_mismatch")["figures"]["mean_abs"] > 1e-3


class _Plane(MemoryDataPlane):
    """A data plane that does to fetched columns what `spoil` says."""

    spoil: Callable[[Column], Column]

    def get_samples(self, meta: KVBatchMeta, select_fields: Sequence[str]) -> SampleBatch:
        batch = super().get_samples(meta, select_fields)
        return SampleBatch(batch.sample_ids, {name: type(self).spoil(column) for name, column in batch.columns.items()})


def narrow(column: Column) -> Column:
    return column.float() if isinstance(column, Tensor) and column.dtype == torch.float64 else column


def denormals_to_zero(column: Column) -> Column:
    if not isinstance(column, JaggedColumn) or column.values.dtype != torch.float32:
        return column
    small = column.values.abs() < torch.finfo(torch.float32).tiny
    return JaggedColumn(column.values.masked_fill(small, 0.0), column.offsets_R1)


def none_to_text(column: Column) -> Column:
    return ObjectColumn(tuple(str(item) for item in column.items)) if isinstance(column, ObjectColumn) else column


def flip_a_flag(column: Column) -> Column:
    if isinstance(column, Tensor) and column.dtype == torch.bool:
        return torch.cat([~column[:1], column[1:]])
    return column


class TestDataPlane:
    @pytest.mark.parametrize("spoil", [narrow, denormals_to_zero, none_to_text, flip_a_flag])
    def test_a_value_that_comes_back_changed(
        self, verify: Verify, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Column], Column]
    ) -> None:
        plane = type("Spoiling", (_Plane,), {"spoil": staticmethod(spoil)})
        monkeypatch.setitem(ADAPTERS, "memory", lambda config: plane())
        row = only_fails(verify(), "data_plane")
        assert row["figures"]["wrong"] >= 1
        assert row["figures"]["first_wrong"]

    def test_a_row_that_is_lost(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        class Losing(MemoryDataPlane):
            def put_samples(
                self,
                sample_ids: Sequence[str],
                fields: Mapping[str, Column],
                partition_id: str,
                tags: Sequence[Tags] | None = None,
            ) -> None:
                super().put_samples(sample_ids, fields, partition_id, tags)
                if "again-verify1_g2" in sample_ids:
                    super().clear_samples(["again-verify1_g2"], partition_id)

        monkeypatch.setitem(ADAPTERS, "memory", lambda config: Losing())
        assert "again-verify1_g2" in only_fails(verify(), "data_plane")["error"]

    def test_rows_that_are_not_cleared(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        class Hoarding(MemoryDataPlane):
            def clear_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
                super().clear_samples([name for name in sample_ids if name != "verify0_g1"], partition_id)

        monkeypatch.setitem(ADAPTERS, "memory", lambda config: Hoarding())
        assert only_fails(verify(), "data_plane")["figures"]["rows_left"] == 1


class TestWeightSync:
    def test_a_tensor_that_is_skipped(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real = weight_update.copy_weights

        def skipping(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
            real(model, [(name, tensor) for name, tensor in tensors if name != "model.norm.weight"])

        monkeypatch.setattr(weight_update, "copy_weights", skipping)
        row = only_fails(verify(), "weight_sync")
        assert (row["figures"]["wrong"], row["figures"]["first_wrong"]) == (1, "model.norm.weight")

    def test_weights_that_are_taken_once_only(self, verify: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = weight_update.copy_weights, itertools.count()

        def once(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
            if next(calls) < 2:  # the first time when the engine starts
                real(model, tensors)

        monkeypatch.setattr(weight_update, "copy_weights", once)
        figures = only_fails(verify(), "weight_sync")["figures"]
        assert figures["wrong"] == 0
        assert figures["unrestored"] == figures["tensors"]
        assert figures["probe_logprob_difference"] > 1e-5

    def test_an_engine_that_computes_with_its_old_weights(
        self, verify: Verify, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its parameters are right, but it has the responses of before at hand."""
        real, known = EmbeddedEngine.generate, dict[str, GenerationResult]()

        async def stale(self: EmbeddedEngine, request: GenerationRequest) -> GenerationResult:
            if request.request_id not in known:
                known[request.request_id] = await real(self, request)
            return known[request.request_id]

        monkeypatch.setattr(EmbeddedEngine, "generate", stale)
        assert only_fails(verify(), "weight_sync")["figures"]["unchanged_generation"] == 1

    @pytest.mark.parametrize("applied", [0, 1])
    def test_a_sync_that_raises_is_a_failed_row(
        self, applied: int, verify: Verify, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the weights that a run begins with, nothing else can be checked."""
        real, calls = EmbeddedEngine.apply, itertools.count()

        async def refusing(self: EmbeddedEngine, publication: WeightPublication) -> None:
            if next(calls) >= applied:
                raise ConnectionError("nobody there")
            await real(self, publication)

        monkeypatch.setattr(EmbeddedEngine, "apply", refusing)
        verified = verify()
        assert "nobody there" in only_fails(verified, "weight_sync")["explanation"]
        assert bool(verified.with_status("skip")) is (applied == 0)


class TestMemory:
    def test_less_than_the_estimate_is_free(
        self, verify: Verify, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        total = estimate_memory(make_config()).total
        monkeypatch.setattr("penstock.run.verify.memory.free_bytes", lambda device: total)
        assert verify().exit_code == 0
        monkeypatch.setattr("penstock.run.verify.memory.free_bytes", lambda device: total - 1)
        row = only_fails(verify(), "memory")
        assert row["bars"]["total_bytes"] == total - 1
        assert "max_tokens_per_microbatch" in row["explanation"]

    def test_a_model_that_does_not_even_fit_is_not_loaded(
        self, verify: Verify, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded: list[object] = []
        for part in ("build.build_serving", "build_trainer.build_trainer"):
            monkeypatch.setattr(f"penstock.run.{part}", lambda *args, **named: loaded.append(args))
        monkeypatch.setattr("penstock.run.verify.memory.free_bytes", lambda device: 1000)
        verified = verify()
        assert loaded == []
        only_fails(verified, "memory")
        assert verified.with_status("pass") == []
        assert "not loaded" in verified.checks["gradient_parity"]["error"]

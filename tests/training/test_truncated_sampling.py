"""Truncated sampling, from the engine's rows to the trainer's gradients: both sides draw from the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.reading.loading import parse_config
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import ConfigError, DataPlaneError, EnvironmentFailure
from penstock.rollout.engines.base import GenerationResult
from penstock.rollout.environments.base import Segment, Trajectory
from penstock.rollout.sample_columns import group_columns
from penstock.training.batching import KeptTokens
from penstock.training.logprobs import selected_logprobs
from penstock.training.workers.local import LocalTrainer
from tests.engines.helpers import generate_all, request, running_engine
from tests.support.tiny_models import tiny_model
from tests.training.support import PARTITION, relative_difference, trainer

PROMPT = (3, 4, 5)
TEMPERATURE = 1.2
TRUNCATIONS: tuple[dict[str, float], ...] = ({"top_p": 0.5}, {"top_k": 4}, {"top_k": 6, "top_p": 0.7}, {"min_p": 0.6})


GENERATED: dict[str, list[GenerationResult]] = {}


async def responses(**truncation: Any) -> list[GenerationResult]:
    """What the engine makes of a prompt; the same for every test, so generated once."""
    if str(truncation) not in GENERATED:
        asked = [request(f"r{i}", PROMPT, new=9, seed=i, temperature=TEMPERATURE, **truncation) for i in range(4)]
        async with running_engine() as engine:
            GENERATED[str(truncation)] = await generate_all(engine, asked)
    return GENERATED[str(truncation)]


def put_rows(results: list[GenerationResult], advantage: float = -1.0) -> tuple[MemoryDataPlane, KVBatchMeta]:
    """The rows that a rollout would write, and an advantage for each."""
    plane = MemoryDataPlane()
    plane.register_partition(PARTITION, fields.ROW_SCHEMA)
    paths = [Trajectory((Segment(PROMPT), Segment(result.token_ids, result)), 0.0, "") for result in results]
    columns = group_columns(paths) | {fields.ADVANTAGE: torch.full((len(results),), advantage)}
    ids = tuple(fields.sample_id("g", index) for index in range(len(results)))
    plane.put_samples(ids, columns, PARTITION)
    lengths = columns[fields.INPUT_IDS].lengths_R.tolist()
    return plane, KVBatchMeta(PARTITION, ids, frozenset(columns), tuple(lengths))


async def raw_gradients(local: LocalTrainer, meta: KVBatchMeta) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients of one step, before they are divided by N, and the step's metrics."""
    await local.begin_train_step(0)
    await local.train_microbatch(0, meta)
    found = await local.read_gradients(lambda each: {name: grad.clone() for name, grad in each.items()})
    return found, (await local.finish_train_step(0)).metrics


def accepted() -> Iterator[Any]:
    """Every loss with every old policy and correction that the configuration takes with truncated sampling."""
    corrections: list[dict[str, Any]] = [{"kind": kind} for kind in ("none", "tis", "icepop", "decoupled")]
    corrections += [{"kind": "sequence_masked", "mean": mean, "low": 0.5} for mean in ("sum", "geometric")]
    for loss in ("ppo_clip", "gspo", "cispo", "reinforce"):
        for old in ("trainer", "engine"):
            for correction in corrections:
                settings = {"loss": {"kind": loss}, "old_policy": old, "correction": correction}
                name = "-".join((loss, old, correction["kind"], correction.get("mean", "")))
                if is_accepted(settings):
                    yield pytest.param(settings, id=name)


def is_accepted(algorithm: Mapping[str, Any]) -> bool:
    rollout = {"environment": {"kind": "math"}, "sampling": {"top_p": 0.5}}
    settings = {"model": {"path": "m"}, "rollout": rollout, "algorithm": algorithm, "data": {"train_path": "d.jsonl"}}
    try:
        parse_config(settings, "test")
    except ConfigError:
        return False
    return True


def test_sampling_without_a_correction_is_among_what_is_accepted() -> None:
    assert {"ppo_clip-trainer-none-", "gspo-engine-none-", "ppo_clip-engine-none-"} <= {each.id for each in accepted()}


@pytest.mark.parametrize("algorithm", tuple(accepted()))
async def test_bad_responses_have_a_gradient_in_every_combination_that_is_accepted(algorithm: dict[str, Any]) -> None:
    for truncation in TRUNCATIONS[:2]:
        plane, meta = put_rows(await responses(**truncation))
        rules = AlgorithmConfig.model_validate(algorithm)
        local = trainer(tiny_model(), plane, temperature=TEMPERATURE, algorithm=rules)
        found, metrics = await raw_gradients(local, meta)
        await local.close()
        assert sum(float(grad.double().square().sum()) for grad in found.values()) ** 0.5 > 1e-2
        assert metrics.get("clip_fraction", 0) == metrics.get("correction_masked_fraction", 0) == 0
        assert metrics.get("ratio_mean", 1) == pytest.approx(1, abs=1e-5)
        assert metrics["mismatch_kl"] < 1e-9
        assert metrics["mismatch_logprob_max_abs"] < 1e-4


@pytest.mark.parametrize("truncation", TRUNCATIONS)
async def test_the_gradient_is_that_of_the_truncated_distribution(truncation: dict[str, float]) -> None:
    """Against logits of the model itself, with everything but the tokens that were left taken out of them."""
    results, model = await responses(**truncation), tiny_model()
    plane, meta = put_rows(results)
    rules = AlgorithmConfig.model_validate({"loss": {"kind": "reinforce"}})
    local = trainer(tiny_model(), plane, temperature=TEMPERATURE, algorithm=rules)
    found, _ = await raw_gradients(local, meta)
    await local.close()
    total = torch.zeros(())
    for result in results:
        logits_TV = model(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0, len(PROMPT) - 1 : -1] / TEMPERATURE
        for logits_V, token, kept in zip(logits_TV, result.token_ids, result.kept_ids, strict=True):
            assert 0 < len(kept) < logits_V.shape[0]
            left = torch.tensor(kept.tolist())
            total = total + logits_V[token] - logits_V[left].logsumexp(0)
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_difference(expected, found) < 1e-5


async def test_rows_sampled_from_the_whole_vocabulary_have_nothing_to_replay() -> None:
    results = await responses()
    assert all(result.kept_ids == () for result in results)
    plane, meta = put_rows(results)
    batch = plane.get_samples(meta, fields.KEPT_FIELDS)
    assert not batch.jagged(fields.KEPT_COUNTS).values.any()
    assert len(batch.jagged(fields.KEPT_IDS).values) == 0


async def test_prompts_between_truncated_turns_keep_the_tokens_apart() -> None:
    one, two = (await responses(top_k=3))[:2]
    path = Trajectory((Segment(PROMPT), Segment(one.token_ids, one), Segment((7,)), Segment(two.token_ids, two)), 0, "")
    columns = group_columns([path])
    counts = columns[fields.KEPT_COUNTS].row(0).tolist()
    assert counts == [0] * 3 + [3] * 9 + [0] + [3] * 9
    assert columns[fields.KEPT_IDS].row(0).tolist() == [id_ for kept in (*one.kept_ids, *two.kept_ids) for id_ in kept]


async def test_a_response_that_was_cut_without_what_it_was_drawn_from_is_refused() -> None:
    result = (await responses(top_k=3))[0]
    cut = replace(
        result, token_ids=result.token_ids[:4], logprobs=result.logprobs[:4], token_versions=result.token_versions[:4]
    )
    with pytest.raises(EnvironmentFailure, match="4 tokens belongs to a generation that says of 9"):
        group_columns([Trajectory((Segment(PROMPT), Segment(cut.token_ids, cut)), 0, "")])


async def test_counts_that_do_not_match_the_ids_are_refused() -> None:
    plane, meta = put_rows(await responses(top_k=3))
    counts = plane.get_samples(meta, fields.KEPT_FIELDS).jagged(fields.KEPT_COUNTS)
    wrong = JaggedColumn(counts.values.clamp(max=2), counts.offsets_R1)
    plane.put_samples(meta.sample_ids, {fields.KEPT_COUNTS: wrong}, meta.partition_id)
    local = trainer(tiny_model(), plane, temperature=TEMPERATURE)
    with pytest.raises(DataPlaneError, match="kept_ids has not as many ids"):
        await raw_gradients(local, meta)
    await local.close()


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
async def test_log_probs_and_entropies_do_not_depend_on_how_tokens_are_cut_up(chunk_tokens: int) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden_TH, weight_VH = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((5, 4), (11, 4)))
    kept = [[1, 4], [], [0, 1, 2, 10], [7], [3, 9]]
    targets = [4, 6, 10, 7, 9]
    starts_S1 = torch.tensor([0, *(len(each) for each in kept)]).cumsum(0)
    tokens = KeptTokens(torch.tensor([id_ for each in kept for id_ in each], dtype=torch.int32), starts_S1)
    hidden_TH.requires_grad_()
    logprobs_T, entropy_T = selected_logprobs(
        hidden_TH, weight_VH, torch.tensor(targets), chunk_tokens=chunk_tokens, entropy_gradient=True, kept=tokens
    )
    (logprobs_T.sum() + entropy_T.sum()).backward()
    found = hidden_TH.grad
    hidden_TH.grad = None
    logits_TV, expected = hidden_TH @ weight_VH.T, []
    for logits_V, ids, target in zip(logits_TV, kept, targets, strict=True):
        left = ids or list(range(11))
        log_odds_K = logits_V[left].log_softmax(0)
        expected.append((log_odds_K[left.index(target)], -(log_odds_K.exp() * log_odds_K).sum()))
    sum(a + b for a, b in expected).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(logprobs_T, torch.stack([a for a, _ in expected]))
    torch.testing.assert_close(entropy_T, torch.stack([b for _, b in expected]))
    torch.testing.assert_close(found, hidden_TH.grad)

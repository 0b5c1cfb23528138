"""The sampler draws what it says it draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rollout.engines.base import SamplingParams
from penstock.rollout.engines.embedded.sampling import plan_sampling, sample, truncate
from tests.engines.helpers import generate_all, request, running_engine
from tests.support.tiny_models import tiny_model

CPU = torch.device("cpu")
LOGITS_V = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, 0.9, 0.1, -0.2])


def draw(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, params: list[SamplingParams]) -> np.ndarray:
    plan = plan_sampling(
        np.array([one.temperature for one in params], dtype=np.float32),
        np.array([one.top_k for one in params], dtype=np.int64),
        np.array([one.top_p for one in params], dtype=np.float32),
        CPU,
    )
    return np.stack(sample(logits_BV.clone(), uniforms_B, plan)[:2])


def expected_probabilities(params: SamplingParams) -> torch.Tensor:
    """The distribution by the textbook: sort, cut, renormalise."""
    probs_V = (LOGITS_V.double() / params.temperature).softmax(-1)
    order = probs_V.argsort(descending=True).tolist()
    kept = order[: params.top_k or None]
    mass = float(probs_V[kept].sum())
    total, nucleus = 0.0, []
    for token in kept:
        if total >= params.top_p:
            break
        nucleus.append(token)
        total += float(probs_V[token]) / mass
    result_V = torch.zeros_like(probs_V)
    result_V[nucleus] = probs_V[nucleus] / probs_V[nucleus].sum()
    return result_V


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, temperature=2.0),
        SamplingParams(1, top_k=4),
        SamplingParams(1, top_p=0.6),
        SamplingParams(1, temperature=1.5, top_k=8, top_p=0.8),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws, far below the 1-in-10,000 quantile for its degrees of freedom."""
    draws = 20_000
    expected_V = expected_probabilities(params)
    uniforms_B = torch.from_numpy(np.random.Generator(np.random.Philox(key=7)).random(draws))
    tokens_B, probs_B = draw(LOGITS_V.expand(draws, -1), uniforms_B, [params] * draws)
    counts_V = np.bincount(tokens_B.astype(int), minlength=len(LOGITS_V))
    possible = expected_V.numpy() > 0
    assert counts_V[~possible].sum() == 0
    assert probs_B == pytest.approx(expected_V.numpy()[tokens_B.astype(int)], rel=1e-4)
    ideal = expected_V.numpy()[possible] * draws
    chi_square = float(((counts_V[possible] - ideal) ** 2 / ideal).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 6


async def test_the_engine_draws_from_the_models_distribution() -> None:
    model, draws = tiny_model(vocabulary=12), 3000
    with torch.no_grad():
        expected_V = tiny_model(vocabulary=12)(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1).numpy()
    async with running_engine(model, max_num_seqs=128, max_model_len=8) as engine:
        results = await generate_all(engine, [request(f"r{i}", new=1, seed=i) for i in range(draws)])
    counts_V = np.bincount([result.token_ids[0] for result in results], minlength=12)
    chi_square = float(((counts_V - expected_V * draws) ** 2 / (expected_V * draws)).sum())
    assert chi_square < 40.0, "the 1-in-10,000 quantile for 11 degrees of freedom is 37.4"


def test_greedy_takes_the_likeliest_with_its_plain_probability() -> None:
    tokens_B, probs_B = draw(LOGITS_V.expand(2, -1), torch.tensor([0.99, 0.0]).double(), [SamplingParams(1, 0.0)] * 2)
    assert tokens_B.tolist() == [0.0, 0.0]
    assert probs_B == pytest.approx([float(LOGITS_V.softmax(-1)[0])] * 2)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_impossible_tokens_are_never_drawn(uniform: float) -> None:
    logits_1V = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]])
    tokens_B, probs_B = draw(logits_1V, torch.tensor([uniform]).double(), [SamplingParams(1)])
    assert tokens_B[0] in (1.0, 3.0)
    assert probs_B[0] > 0.0


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=24),
    top_k=st.integers(1, 30),
    top_p=st.floats(0.0625, 1.0, width=32),
)
def test_truncation_keeps_the_fewest_tokens_that_reach_top_p(logits: list[float], top_k: int, top_p: float) -> None:
    logits_1V = torch.tensor([logits])
    kept_V = truncate(logits_1V, torch.tensor([[top_k]]), torch.tensor([[top_p]]))[0]
    kept = kept_V.isfinite()
    assert 1 <= int(kept.sum()) <= top_k
    assert torch.equal(kept_V[kept], logits_1V[0][kept]), "what stays is unchanged"
    if not kept.all():
        assert logits_1V[0][kept].min() >= logits_1V[0][~kept].max(), "the likeliest stay"
    top_V = torch.sort(logits_1V[0], descending=True).values[:top_k].double().softmax(-1)
    count = int(kept.sum())
    assert float(top_V[: count - 1].sum()) <= top_p + 1e-5, "one fewer would not reach top_p"
    assert float(top_V[:count].sum()) >= min(top_p, 1.0) - 1e-5 or count == len(top_V)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5), st.floats(0.1, 1.0)), min_size=2, max_size=6))
def test_a_rows_draw_does_not_depend_on_the_other_rows(rows: list[tuple[float, int, float]]) -> None:
    params = [SamplingParams(1, temperature=t, top_k=k, top_p=p) for t, k, p in rows if t == 0 or t > 0.05]
    generator = torch.Generator().manual_seed(len(rows))
    logits_BV = torch.randn(len(params), 37, generator=generator)
    uniforms_B = torch.rand(len(params), generator=generator, dtype=torch.float64)
    together = draw(logits_BV, uniforms_B, params) if params else np.zeros((2, 0))
    for row, one in enumerate(params):
        alone = draw(logits_BV[row : row + 1], uniforms_B[row : row + 1], [one])
        assert alone[:, 0].tolist() == together[:, row].tolist()

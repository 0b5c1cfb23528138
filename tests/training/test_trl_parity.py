"""Loss and gradients of a step equal those of TRL's GRPOTrainer on the same batch, where the two mean the same thing.

A real trainer of TRL gets the sampled tokens through its `rollout_func` and does the rest itself: rewards, advantages,
masks, padding, log-probs, the loss, backward. Here the same samples lie in the data plane as rows and go through the
advantage pump and the local worker. Both hold the same model in float32, sample at a temperature other than 1, and have
tokens inside responses that the model did not write.

Where they differ in meaning, and what is compared instead:

- `bnpo` divides by the tokens of a micro-batch: with accumulation the result depends on how rows are dealt out. Here
  N is the step's, which is `dapo`; `bnpo` is compared without accumulation.
- `grpo` with `mask_truncated_completions` still counts masked rows in its mean, here they do not count; `token_mean`
  is compared.
- The KL term is multiplied by the ratio in TRL unless `use_bias_correction_kl` is off; it is off here.
- The entropy bonus is a mean over tokens in TRL whatever the loss; here it follows `algorithm.loss.aggregation`;
  `token_mean` is compared.
- CISPO's bound is on the ratio itself in TRL (`epsilon_high`), here it is `1 + clip_ratio_high`.
- The standard deviation is the sample one and its epsilon 1e-4 on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.controller.pumps.advantage import AdvantagePump, ScoredChunk
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.training.workers.local import local_worker
from tests.support.tiny_models import save_tiny_model
from tests.training.reference import row_logprobs
from tests.training.support import chunks, gradients, relative_difference, training

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

GROUPS, SAMPLES, LONGEST, VOCABULARY, EOS = 3, 4, 12, 90, 1
TEMPERATURE = 0.8
LOW, HIGH = 0.2, 0.28
CLIP = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("parity"), seed=1)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def move(model: Any) -> None:
    """What an optimizer step does: all weights change a little."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=rng))


@dataclass(frozen=True)
class Samples:
    """What was sampled: lists have one entry per sample, groups after each other."""

    prompts: list[list[int]]
    responses: list[list[int]]
    masks: list[list[int]]
    """1 where the model wrote the token."""
    logprobs: list[list[float]]
    """The engine's, near those of the trainer."""
    rewards: list[float]

    @classmethod
    def draw(cls, folder: Path) -> Samples:
        rng = torch.Generator().manual_seed(3)

        def ids(low: int, high: int) -> list[int]:
            count = int(torch.randint(low, high, (), generator=rng))
            drawn: list[int] = torch.randint(3, VOCABULARY, (count,), generator=rng).tolist()
            return drawn

        model = load(folder)
        prompts = [prompt for prompt in (ids(3, 7) for _ in range(GROUPS)) for _ in range(SAMPLES)]
        responses = [ids(4, LONGEST) + [EOS] * (row % 3 > 0) for row in range(GROUPS * SAMPLES)]
        masks = [[1, *[int(row % 2 == 0)] * 2, *[1] * (len(tokens) - 3)] for row, tokens in enumerate(responses)]
        logprobs = []
        for prompt, response in zip(prompts, responses, strict=True):
            exact_L = row_logprobs(model, torch.tensor(prompt + response), TEMPERATURE).detach()[-len(response) :]
            logprobs.append((exact_L + 0.3 * torch.randn(exact_L.shape, generator=rng)).tolist())
        rewards = torch.rand(GROUPS * SAMPLES, generator=rng).tolist()
        return cls(prompts, responses, masks, logprobs, rewards)

    @property
    def truncated(self) -> list[bool]:
        return [response[-1] != EOS for response in self.responses]


@pytest.fixture(scope="module")
def samples(folder: Path) -> Samples:
    return Samples.draw(folder)


@dataclass(frozen=True)
class Step:
    """What a side makes of the samples."""

    advantages_R: Tensor
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def by_trl(folder: Path, samples: Samples, *, moved: bool = False, accumulate: int = 1, **settings: Any) -> Step:
    """TRL's step; `moved` as in the second of two iterations, whose old log-probs are from before the first."""
    from trl.trainer.utils import split_tensor_dict

    with _their_trainer(folder, samples, moved, accumulate, settings) as trainer:
        inputs = trainer._generate_and_score_completions([{"prompt": "?"}] * len(samples.prompts))
        if moved:
            move(trainer.model)
        losses = [trainer.compute_loss(trainer.model, part) for part in split_tensor_dict(inputs, accumulate)]
        loss = torch.stack(losses).sum()
        loss.backward()
        metrics = {key: values[-1] for key, values in trainer._metrics["train"].items()}
        return Step(inputs["advantages"], loss.item(), gradients(trainer.model), metrics)


@contextmanager
def _their_trainer(
    folder: Path, samples: Samples, moved: bool, accumulate: int, settings: dict[str, Any]
) -> Iterator[Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": samples.prompts,
            "completion_ids": samples.responses,
            "logprobs": samples.logprobs,
            "env_mask": samples.masks,
        }

    rows = len(samples.prompts)
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=rows // accumulate,
        gradient_accumulation_steps=accumulate,
        num_generations=SAMPLES,
        num_iterations=2 if moved else 1,
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        use_bias_correction_kl=False,
        **{"epsilon": LOW, "epsilon_high": HIGH, **settings},
    )
    trainer = GRPOTrainer(
        str(folder),
        lambda **_: samples.rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["?"] * rows}),
        rollout_func=rollout,
    )
    # As vLLM's correction would be: its server is not needed, as the tokens and their log-probs are there already.
    trainer.use_vllm, trainer._last_loaded_step = "vllm_importance_sampling_mode" in settings, 0
    trainer.current_gradient_accumulation_steps = accumulate
    trainer.model.train()
    yield trainer


async def by_penstock(folder: Path, samples: Samples, *, moved: bool = False, parts: int = 1, **settings: Any) -> Step:
    """The same step here, in `parts` chunks."""
    algorithm = AlgorithmConfig.model_validate(settings)
    model, plane = load(folder), MemoryDataPlane()
    plane.register_partition("train", fields.ROW_SCHEMA)
    config = training(optimizer={"lr": 0.0}, minibatches_per_step=2 if moved else 1)
    worker = local_worker(model, plane, algorithm, config, temperature=TEMPERATURE)
    metas = [worker.prepare(meta).meta for meta in _put(plane, samples)]
    scored = await _scored(plane, algorithm, metas)
    if moved:
        move(model)
    worker.begin(0)
    for chunk in chunks([part.meta for part in scored], parts):
        worker.microbatch(0, chunk)
    raw = gradients(model)
    metrics = worker.finish(0).metrics
    by_token = getattr(algorithm.loss, "aggregation", "sequence_mean") == "token_mean"
    count = metrics["tokens" if by_token else "sequences"]
    scaled = {name: gradient / count for name, gradient in raw.items()}
    return Step(torch.cat([part.advantages_S for part in scored]), metrics["loss"], scaled, metrics)


def _put(plane: MemoryDataPlane, samples: Samples) -> list[KVBatchMeta]:
    metas = []
    for group in range(GROUPS):
        rows = range(group * SAMPLES, (group + 1) * SAMPLES)
        before = [0] * len(samples.prompts[rows[0]])
        tokens = [torch.tensor(samples.prompts[row] + samples.responses[row]) for row in rows]
        masks = [torch.tensor([*before, *samples.masks[row]], dtype=torch.float32) for row in rows]
        engine = [torch.tensor([*before, *samples.logprobs[row]]) for row in rows]
        columns: dict[str, Any] = {
            fields.INPUT_IDS: JaggedColumn.from_rows(tokens),
            fields.TOKEN_MASK: JaggedColumn.from_rows(masks),
            fields.GENERATION_LOGPROBS: JaggedColumn.from_rows(engine),
            fields.TOKEN_VERSIONS: JaggedColumn.from_rows([mask.to(torch.int32) - 1 for mask in masks]),
            fields.REWARD: torch.tensor([samples.rewards[row] for row in rows]),
            fields.SAMPLE_MASK: torch.ones(SAMPLES),
            fields.RESPONSE_LENGTH: torch.tensor([sum(samples.masks[row]) for row in rows]),
            fields.TRUNCATED: torch.tensor([samples.truncated[row] for row in rows]),
        }
        ids = tuple(fields.sample_id(f"p{group}", index) for index in range(SAMPLES))
        plane.put_samples(ids, columns, "train")
        metas.append(KVBatchMeta("train", ids, frozenset(columns), tuple(len(row) for row in tokens)))
    return metas


async def _scored(plane: MemoryDataPlane, algorithm: AlgorithmConfig, metas: list[KVBatchMeta]) -> list[ScoredChunk]:
    pump = AdvantagePump(plane, algorithm, LONGEST)
    running = asyncio.create_task(pump.run())
    try:
        return [await pump.submit(meta) for meta in metas]
    finally:
        running.cancel()


def assert_same(ours: Step, theirs: Step) -> None:
    torch.testing.assert_close(ours.advantages_R.to(torch.float32), theirs.advantages_R, rtol=1e-5, atol=1e-6)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6)
    assert relative_difference(theirs.gradients, ours.gradients) < 1e-5
    assert sum(float(gradient.norm()) for gradient in theirs.gradients.values()) > 1e-3


def ppo(aggregation: str) -> dict[str, Any]:
    constant = {"constant_length": LONGEST} if aggregation == "token_sum_norm" else {}
    return {"kind": "ppo_clip", "aggregation": aggregation, **CLIP, **constant}


AGGREGATIONS = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "token_sum_norm",
}


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
async def test_a_clipped_loss_after_the_weights_have_moved(folder: Path, samples: Samples, loss_type: str) -> None:
    ours = await by_penstock(folder, samples, moved=True, loss=ppo(AGGREGATIONS[loss_type]))
    theirs = by_trl(folder, samples, moved=True, loss_type=loss_type)
    assert_same(ours, theirs)
    assert ours.metrics["clip_fraction"] == pytest.approx(theirs.metrics["clip_ratio/region_mean"], abs=1e-6)
    assert ours.metrics["clip_fraction"] > 0.02
    assert ours.metrics["entropy"] == pytest.approx(theirs.metrics["entropy"], rel=1e-5)


async def test_an_on_policy_step_without_normalisation_by_deviation(folder: Path, samples: Samples) -> None:
    ours = await by_penstock(
        folder, samples, advantage={"kind": "grpo", "normalize_std": False}, loss=ppo("token_mean")
    )
    assert_same(ours, by_trl(folder, samples, loss_type="dapo", scale_rewards="none"))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
async def test_a_streamed_step_is_their_accumulated_one(folder: Path, samples: Samples, loss_type: str) -> None:
    ours = await by_penstock(folder, samples, parts=3, loss=ppo(AGGREGATIONS[loss_type]))
    assert_same(ours, by_trl(folder, samples, accumulate=3, loss_type=loss_type))


async def test_a_dual_clip_is_their_delta(folder: Path, samples: Samples) -> None:
    ours = await by_penstock(folder, samples, moved=True, loss=ppo("token_mean") | {"dual_clip": 1.4})
    assert ours.metrics["dual_clip_fraction"] > 0
    assert_same(ours, by_trl(folder, samples, moved=True, loss_type="dapo", delta=1.4))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
async def test_a_kl_penalty_against_the_reference_is_k3(folder: Path, samples: Samples, loss_type: str) -> None:
    kl = {"coefficient": 0.5, "estimator": "k3"}
    ours = await by_penstock(folder, samples, moved=True, loss=ppo(AGGREGATIONS[loss_type]), kl=kl)
    theirs = by_trl(folder, samples, moved=True, loss_type=loss_type, beta=0.5)
    assert_same(ours, theirs)
    assert ours.metrics["kl_reference"] == pytest.approx(theirs.metrics["kl"], rel=1e-4)


async def test_gspo_is_their_ratio_of_sequences(folder: Path, samples: Samples) -> None:
    clip = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}
    ours = await by_penstock(folder, samples, moved=True, loss={"kind": "gspo", **clip})
    settings = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
    assert 0 < ours.metrics["clip_fraction"] < 1
    assert_same(ours, by_trl(folder, samples, moved=True, loss_type="grpo", **settings))


async def test_cispo(folder: Path, samples: Samples) -> None:
    ours = await by_penstock(folder, samples, moved=True, loss={"kind": "cispo", "clip_ratio_high": 0.2})
    assert ours.metrics["clip_high_fraction"] > 0
    assert_same(ours, by_trl(folder, samples, moved=True, loss_type="cispo", epsilon_high=1.2))


async def test_an_entropy_bonus_at_the_token_level(folder: Path, samples: Samples) -> None:
    ours = await by_penstock(folder, samples, moved=True, loss=ppo("token_mean"), entropy_coefficient=0.1)
    assert_same(ours, by_trl(folder, samples, moved=True, loss_type="dapo", entropy_coef=0.1))


CORRECTIONS = {
    "token_truncate": ({"kind": "tis", "cap": 1.2}, {"clip_max": 1.2}),
    "token_mask": ({"kind": "icepop", "low": 0.7, "high": 1.3}, {"clip_min": 0.7, "clip_max": 1.3}),
    "sequence_mask": ({"kind": "sequence_masked", "low": 0.4, "high": 1.8}, {"clip_min": 0.4, "clip_max": 1.8}),
}


@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("moved", [False, True])
async def test_corrections_of_the_engines_logprobs(folder: Path, samples: Samples, mode: str, moved: bool) -> None:
    correction, bounds = CORRECTIONS[mode]
    ours = await by_penstock(folder, samples, moved=moved, loss=ppo("token_mean"), correction=correction)
    settings = {f"vllm_importance_sampling_{key}": value for key, value in bounds.items()}
    settings["vllm_importance_sampling_mode"] = mode
    theirs = by_trl(folder, samples, moved=moved, loss_type="dapo", **settings)
    assert_same(ours, theirs)
    plain = await by_penstock(folder, samples, moved=moved, loss=ppo("token_mean"))
    assert relative_difference(plain.gradients, ours.gradients) > 0.01


async def test_truncated_responses_left_out_at_the_token_level(folder: Path, samples: Samples) -> None:
    assert 0 < sum(samples.truncated) < len(samples.truncated)
    ours = await by_penstock(folder, samples, loss=ppo("token_mean"), reward={"overlong": "mask"})
    assert_same(ours, by_trl(folder, samples, loss_type="dapo", mask_truncated_completions=True))

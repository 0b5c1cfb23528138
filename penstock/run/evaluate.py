"""Evaluation: one response per held-out prompt, and their mean reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.models import EvalConfig, RunConfig
from penstock.controller.failure import describe
from penstock.errors import PenstockError, SetupError
from penstock.rollout.engines.base import GenerationEngine, SamplingParams
from penstock.rollout.environments.base import Environment, Split, Trajectory
from penstock.rollout.handle import SampleHandle, Tokenizer
from penstock.rollout.prompts import Prompt, derive_seed
from penstock.run.build import Serving, build_serving
from penstock.run.checkpoint import newest_checkpoint


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found."""

    reward_mean: float
    prompts: int
    truncation_rate: float
    response_length_mean: float
    failures: tuple[str, ...] = ()
    """Prompts that could not be scored; they are left out of the means, never counted as zero."""


async def evaluate_prompts(serving: Serving, config: RunConfig) -> EvalReport | None:
    """Evaluate what the engine serves now; None when there are no held-out prompts."""
    prompts = serving.environment.prompts(Split.EVAL)
    if not prompts:
        return None
    sampling = eval_sampling(serving.sampling, config.eval)
    limit = asyncio.Semaphore(config.rollout.engine.slots)

    async def one(prompt: Prompt) -> Trajectory | str:
        async with limit:
            return await _play(serving.engine, serving.environment, serving.tokenizer, prompt, sampling, config)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(prompt)) for prompt in prompts]
    outcomes = [task.result() for task in running]
    played = [outcome for outcome in outcomes if isinstance(outcome, Trajectory)]
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, str))
    if not played:
        raise SetupError(f"evaluation: none of {len(prompts)} held-out prompts could be scored; first: {failures[0]}")
    return _report(played, failures)


def eval_sampling(sampling: SamplingParams, config: EvalConfig) -> SamplingParams:
    """Sampling of evaluation: that of training, made greedy where asked."""
    length = config.max_new_tokens or sampling.max_new_tokens
    if config.greedy:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=length)
    return replace(sampling, max_new_tokens=length)


async def _play(
    engine: GenerationEngine,
    environment: Environment,
    tokenizer: Tokenizer,
    prompt: Prompt,
    sampling: SamplingParams,
    config: RunConfig,
) -> Trajectory | str:
    handle = SampleHandle(
        engine=engine,
        tokenizer=tokenizer,
        sampling=sampling,
        group_id=f"eval-{prompt.prompt_id}",
        sample=f"eval-{prompt.prompt_id}",
        seed=derive_seed(config.seed, "eval", prompt.prompt_id),
        timeout_seconds=config.rollout.generation_timeout_seconds,
    )
    try:
        return await environment.run(prompt, handle)
    except PenstockError as error:
        return f"{prompt.prompt_id}: {describe(error)}"


def _report(played: Sequence[Trajectory], failures: tuple[str, ...]) -> EvalReport:
    return EvalReport(
        reward_mean=sum(t.reward for t in played) / len(played),
        prompts=len(played),
        truncation_rate=sum(t.truncated for t in played) / len(played),
        response_length_mean=sum(t.length for t in played) / len(played),
        failures=failures,
    )


def evaluate(config: RunConfig, run_dir: Path | None = None) -> dict[str, Any]:
    """Evaluate `config.model`, or the newest checkpoint of `run_dir`, on the held-out prompts."""
    if run_dir is not None:
        checkpoint = newest_checkpoint(run_dir / "checkpoints")
        # A checkpoint's weights are whole, whether adapters were trained or not.
        model = config.model.model_copy(update={"path": str(checkpoint), "lora": None})
        config = config.model_copy(update={"model": model})
    return asyncio.run(_evaluate(config))


async def _evaluate(config: RunConfig) -> dict[str, Any]:
    serving = build_serving(config, trains_too=False)
    try:
        report = await evaluate_prompts(serving, config)
    finally:
        await serving.close()
    if report is None:
        raise SetupError("there are no held-out prompts; set data.eval_path")
    return {"model": config.model.path, **vars(report)}

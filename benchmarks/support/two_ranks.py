"""Tokens per second of a fleet of two engine processes with one thread each, next to one process with two threads."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time

from benchmarks.support.published_weights import Case, random_model
from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.base import GenerationRequest, SamplingParams
from penstock.rollout.engines.process import EngineProcess, ProcessEngine
from penstock.rollout.fleet import EngineFleet

_CORES = 2
_GROUP = 8
_REQUESTS = 64


def rank_figures(case: Case, passes: int) -> dict[str, float]:
    """Medians over passes of the same requests, which the two fleets take in turns while the other one is idle."""
    return asyncio.run(_measured(case, passes))


async def _measured(case: Case, passes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        random_model(case).save_pretrained(folder)
        model = ModelConfig(path=folder, dtype="float32")
        fleets = {ranks: await asyncio.to_thread(_fleet, model, ranks) for ranks in (1, _CORES)}
        speeds: dict[int, list[float]] = {ranks: [] for ranks in fleets}
        try:
            for number in range(passes + 1):
                for ranks, fleet in fleets.items():
                    speed = await _tokens_per_second(fleet, number)
                    if number:  # the first pass warms up
                        speeds[ranks].append(speed)
        finally:
            for fleet in fleets.values():
                await fleet.close()
    ratios = [two / one for one, two in zip(speeds[1], speeds[_CORES], strict=True)]
    return {
        "one_rank_tok_s": statistics.median(speeds[1]),
        "two_ranks_tok_s": statistics.median(speeds[_CORES]),
        "two_ranks_over_one": statistics.median(ratios),
    }


def _fleet(model: ModelConfig, ranks: int) -> EngineFleet:
    options = {"max_num_seqs": _REQUESTS // ranks, "max_model_len": 256, "threads": _CORES // ranks}
    begun = [EngineProcess(model, "cpu", name=f"embedded-{rank}", **options) for rank in range(ranks)]
    return EngineFleet([ProcessEngine(process) for process in begun])


async def _tokens_per_second(fleet: EngineFleet, seed: int) -> float:
    """All requests at once, in groups; responses have 16 to 112 tokens."""
    chance = random.Random(seed)
    requests = [
        GenerationRequest(
            f"r{number}",
            tuple(range(3, 35)),
            SamplingParams(max_new_tokens=chance.randrange(16, 113)),
            seed=number,
            group_id=f"g{number // _GROUP}",
        )
        for number in range(_REQUESTS)
    ]
    began = time.perf_counter()
    results = await asyncio.gather(*map(fleet.generate, requests))
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - began)

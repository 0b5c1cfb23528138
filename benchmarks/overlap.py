"""How much of generation and training overlaps: the real controller and clock on a scripted engine and trainer.

Responses take seeded lognormal times (sigma = 1); a group is ready at r_k, when its slowest response is. Training a
group takes p_k, proportional to the length of its responses, and 0.8 of the generation makespan in all. A step that
begins training at once on what is ready can end no earlier than

    bound = max_k (r_k + sum of p_j over groups j with r_j >= r_k) + finish + sync

Four ways of running the same trace are timed: streaming on-policy (a chunk is as little as one group), batch at once
(strict on-policy too, but training waits for the whole step), which is also what synchronous means here, and `windowed`
with a window of 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from penstock.rollout.engines.base import GenerationRequest
from penstock.rollout.engines.scripted import ScriptedResponse
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.scripted_run import ScriptedRun, scripted_config

GROUPS, RESPONSES, FINISH_SECONDS, TRAIN_SHARE = 32, 4, 0.01, 0.8


@dataclass(frozen=True)
class Trace:
    """Response times and training times of every group of a run, by prompt number, in steps of `GROUPS`."""

    response_seconds: Sequence[Sequence[float]]
    train_seconds: Sequence[float]

    @classmethod
    def make(cls, seed: int, steps: int, makespan: float) -> Trace:
        rng = random.Random(seed)
        response_seconds: list[list[float]] = []
        train_seconds: list[float] = []
        for _ in range(steps):
            raw = [[rng.lognormvariate(0, 1) for _ in range(RESPONSES)] for _ in range(GROUPS)]
            scale = makespan / max(map(max, raw))
            step = [[scale * seconds for seconds in group] for group in raw]
            work = sum(map(sum, step))
            response_seconds += step
            train_seconds += [TRAIN_SHARE * makespan * sum(group) / work for group in step]
        return cls(response_seconds, train_seconds)

    def bound(self, step: int, sync_seconds: float) -> float:
        """The earliest end of a step, after its beginning."""
        prompts = range(step * GROUPS, (step + 1) * GROUPS)
        ready = {k: max(self.response_seconds[k]) for k in prompts}
        after = max(r + sum(self.train_seconds[j] for j in prompts if ready[j] >= r) for r in ready.values())
        return after + FINISH_SECONDS + sync_seconds


def run_trace(
    trace: Trace, steps: int, staleness: Mapping[str, Any], min_groups_per_chunk: int
) -> list[dict[str, float]]:
    """The metrics of every step of one run over the trace."""
    prompt_of: dict[str, int] = {}

    def script(request: GenerationRequest) -> ScriptedResponse:
        prompt = request.prompt_ids[0]
        prompt_of[request.group_id] = prompt
        sample = int(request.request_id.split("_g")[1].split("_")[0])
        return ScriptedResponse(seconds=trace.response_seconds[prompt][sample])

    trainer = ScriptedTrainer(
        chunk_seconds=lambda meta: sum(trace.train_seconds[prompt_of[group]] for group in meta.group_ids),
        finish_seconds=FINISH_SECONDS,
    )
    config = scripted_config(
        staleness=dict(staleness),
        buffer={"max_buffered_groups": 4 * GROUPS},
        rollout={"group_size": RESPONSES, "max_inflight_groups": 4 * GROUPS},
        training={"prompt_groups_per_step": GROUPS, "min_groups_per_chunk": min_groups_per_chunk, "max_steps": steps},
    )
    run = ScriptedRun(config, prompts=steps * GROUPS, script=script, trainer=trainer)
    asyncio.run(run.run(limit_seconds=600))
    return run.steps


def step_seconds(metrics: Sequence[Mapping[str, float]]) -> float:
    """Mean time of a step."""
    return statistics.mean(step["timing/step_s"] for step in metrics)


def measure(seed: int, steps: int, makespan: float) -> dict[str, float]:
    """The three ratios on one seeded trace."""
    trace = Trace.make(seed, steps, makespan)
    on_policy, window = {"policy": "on_policy"}, {"policy": "windowed", "max_staleness": 1}
    streaming = run_trace(trace, steps, on_policy, 1)
    batch = run_trace(trace, steps, on_policy, GROUPS)
    window1 = run_trace(trace, steps, window, 1)
    bounds = [trace.bound(step, metrics["timing/sync_s"]) for step, metrics in enumerate(streaming)]
    return {
        "streaming_over_bound": step_seconds(streaming) / statistics.mean(bounds),
        "batch_over_streaming": step_seconds(batch) / step_seconds(streaming),
        "sync_over_window1": step_seconds(batch) / step_seconds(window1),
        "lag_max_window1": max(step["staleness/lag_max"] for step in window1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and shorter steps; under a minute")
    options = parser.parse_args()
    seeds, steps, makespan = (3, 5, 0.8) if options.quick else (7, 8, 1.5)
    print(f"{GROUPS} groups of {RESPONSES} a step, {steps} steps, generation makespan {makespan} s, {seeds} seeds")
    print(f"{'seed':>4} {'streaming/bound':>16} {'batch/streaming':>16} {'sync/window 1':>14} {'lag':>4}")
    rows = []
    for seed in range(seeds):
        row = measure(seed, steps, makespan)
        rows.append(row)
        print(
            f"{seed:>4} {row['streaming_over_bound']:>16.3f} {row['batch_over_streaming']:>16.3f} "
            f"{row['sync_over_window1']:>14.3f} {row['lag_max_window1']:>4.0f}"
        )
    medians = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
    worst = {
        "streaming_over_bound_worst": round(max(row["streaming_over_bound"] for row in rows), 4),
        "batch_over_streaming_worst": round(min(row["batch_over_streaming"] for row in rows), 4),
        "sync_over_window1_worst": round(min(row["sync_over_window1"] for row in rows), 4),
    }
    print(json.dumps(medians | worst))


if __name__ == "__main__":
    main()

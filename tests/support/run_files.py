"""Files of a run that never ran: as a real one leaves them, of any length, with failures on request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock.observe.group_lives import GroupEnd
from penstock.observe.timeline import Timeline
from penstock.observe.trace import LIMIT_BYTES, TraceFile

HOSTILE = "</script><img src=x onerror=alert(1)><!--\u2028 ' \" & </pre></style>"
START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
CONFIG = """\
model: {path: some/model}
rollout:
  environment: {kind: "reasoning_gym:chain_sum"}
training: {max_steps: 100}
staleness: {policy: windowed, max_staleness: 2}
"""


def write_run(folder: Path, steps: int = 30, *, environments: int = 1, failures: bool = False) -> Path:
    """A finished run of so many steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    metrics: list[dict[str, Any]] = [{"step": 0, "eval/reward_mean": 0.1}]
    metrics += [step_metrics(step, environments) for step in range(1, steps + 1)]
    metrics.append({"step": steps, "eval/reward_mean": 0.8})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "events.jsonl", list(events(steps, failures)))
    write_lines(folder / "samples.jsonl", [sample(step) for step in range(1, steps + 1) for _ in range(2)])
    (folder / "summary.json").write_text(json.dumps({"stopped_by": "max_steps", "steps": steps}))
    write_trace(folder / "trace.json", steps)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def step_metrics(step: int, environments: int = 1) -> dict[str, Any]:
    noise = math.sin(step * 12.9898) * 0.1
    reward = 0.2 + 0.6 * (1 - math.exp(-step / 40)) + noise
    metrics: dict[str, Any] = {
        "step": step,
        "train/loss": noise / 10,
        "train/grad_norm": 1.5 + 4 * abs(noise),
        "train/entropy": 1.2 * math.exp(-step / 200),
        "train/approx_kl": abs(noise) / 100,
        "train/mismatch_kl": 1e-4 + abs(noise) / 1e4,
        "train/clip_fraction": 0.0,
        "train/lr": 1e-5,
        "train/reward_mean": reward,
        "train/tokens": 900.0,
        "rollout/response_length_mean": 60 + 20 * noise,
        "rollout/response_length_max": 96.0,
        "rollout/truncation_rate": abs(noise),
        "rollout/tokens_generated": 1000.0 * step,
        "rollout/prompts_dropped": 0.0,
        "staleness/lag_max": 2.0 if step > 2 else 0.0,
        "staleness/lag_histogram/0": 10.0,
        "throughput/generated_tokens_s": 1900 + 300 * noise,
        "throughput/trained_tokens_s": 1500 + 300 * noise,
        "timing/step_s": 0.5,
        "timing/exposed_s": 0.05 + abs(noise) / 2,
        "timing/train_busy_s": 0.35,
        "timing/advantages_s": 0.01,
        "timing/finish_s": 0.02,
        "timing/sync_s": 0.03,
        "timing/generation_busy_s": 0.3,
        "timing/overlap_efficiency": 0.8 + noise / 4,
        "timing/elapsed_s": 0.5 * step,
        "buffer/ready": 16.0,
        "buffer/reserved": 16.0,
    }
    if step > 2:
        metrics |= {"staleness/lag_histogram/1": 4.0, "staleness/lag_histogram/2": 2.0}
    names = [f"environment-{k}" for k in range(environments)]
    return metrics | {f"train/reward_mean/{name}": reward * (k + 1) / environments for k, name in enumerate(names)}


def events(steps: int, failures: bool) -> Iterator[dict[str, Any]]:
    def at(step: float) -> str:
        return (START + timedelta(seconds=0.5 * step)).isoformat(timespec="milliseconds")

    yield {"time": at(0), "event": "run_started", "run_dir": "runs/x"}
    for step in range(1, steps + 1):
        yield {"time": at(step), "event": "weights_published", "version": step}
        if failures and step % 3 == 0:
            cause = f"EnvironmentFailure: the reward of prompt {step % 5} is nan"
            yield {"time": at(step), "event": "rollout_retried", "group_id": f"group{step:08d}", "cause": cause}
        if failures and step % 4 == 0:
            yield {"time": at(step), "event": "group_evicted", "prompt_id": str(step), "redispatches": 1}
        if failures and step == 20:
            yield {"time": at(step), "event": "prompt_dropped", "prompt_id": "7", "reason": f"EngineError: {HOSTILE}"}
    yield {"time": at(steps), "event": "run_ended", "stopped_by": "max_steps", "steps": steps}


def sample(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "group_id": f"group{step:08d}",
        "prompt_id": str(step),
        "environment": "environment-0",
        "prompt": f"What is {step} + {step}?",
        "response": f"It is\n\n    {2 * step}.",
        "reward": (step % 5) / 4,
        "advantage": 0.5,
        "lag": 1,
        "length": 12,
        "truncated": step % 7 == 0,
    }


class StepClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write_trace(
    path: Path, steps: int, *, groups_per_step: int = 4, limit_bytes: int = LIMIT_BYTES, evaluated: bool = False
) -> None:
    """The timeline of a run with half a second a step: generation, training and weight updates in turn."""
    clock = StepClock()
    timeline = Timeline(TraceFile(path, limit_bytes), clock)
    pump, trainer = timeline.track("controller", "train pump"), timeline.track("trainer", "trainer")
    pauses = timeline.track("engines", "engine: weight updates")
    run = timeline.track("controller", "run") if evaluated else None
    for step in range(1, steps + 1):
        begin = 0.5 * (step - 1)
        groups = [f"group{(step - 1) * groups_per_step + k:08d}" for k in range(groups_per_step)]
        clock.now = begin
        pump.begin(f"step {step}", step=step)
        pump.switch("waiting for groups")
        timeline.count("engines", "engine slots at work", percent=90.0)
        for group in groups:
            timeline.groups.dispatched(group, prompt_id="7", start_version=step - 1)
        clock.now = begin + 0.15
        for group in groups:
            timeline.groups.committed(group)
            timeline.groups.selected(group, step=step, lag=0)
            timeline.groups.note(group, reward_mean=0.5)
        pump.switch("waiting for the trainer to finish the step")
        timeline.count("engines", "engine slots at work", percent=0.0)
        clock.now = begin + 0.45
        trainer.add("train_microbatch", begin + 0.15, begin + 0.43, step=step)
        trainer.add("finish_train_step", begin + 0.43, begin + 0.45, step=step)
        for group in groups:
            timeline.groups.ended(group, GroupEnd.TRAINED)
        clock.now = begin + 0.49
        pauses.add("paused for new weights", begin + 0.46, begin + 0.49, version=step)
        if run is not None:
            run.add("evaluation", begin + 0.46, begin + 0.49, step=step)
        pump.end()
    timeline.close()

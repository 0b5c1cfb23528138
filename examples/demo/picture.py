"""A picture of a run, from its `metrics.jsonl`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WINDOW = 10


def draw_run(run_dir: Path) -> Path:
    """Reward over steps, and the time of a step; gives the path of the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "train/reward_mean" in line]
    evals = [line for line in lines if "eval/reward_mean" in line]
    figure, (rewards, times) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2), layout="constrained")
    _draw_rewards(rewards, steps, evals)
    _draw_times(times, steps)
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _draw_rewards(axes: Any, steps: Sequence[dict[str, float]], evals: Sequence[dict[str, float]]) -> None:
    x = [line["step"] for line in steps]
    reward = [line["train/reward_mean"] for line in steps]
    axes.plot(x, reward, color="#9ecae1", linewidth=1, label="sampled, each step")
    axes.plot(x, _smooth(reward), color="#08519c", linewidth=2, label=f"mean of {WINDOW} steps")
    axes.plot(
        [line["step"] for line in evals],
        [line["eval/reward_mean"] for line in evals],
        "o",
        markersize=8,
        color="#d94801",
        label="held-out prompts, greedy",
    )
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), title="Reward")
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.25)


def _draw_times(axes: Any, steps: Sequence[dict[str, float]]) -> None:
    x = [line["step"] for line in steps]
    training = [line["timing/train_busy_s"] + line["timing/finish_s"] for line in steps]
    axes.plot(x, _smooth([line["timing/step_s"] for line in steps]), color="#252525", linewidth=2, label="whole step")
    axes.plot(x, _smooth(training), color="#08519c", linewidth=2, label="trainer works")
    axes.plot(
        x,
        _smooth([line["timing/exposed_s"] for line in steps]),
        color="#d94801",
        linewidth=2,
        label="trainer waits for rollouts",
    )
    axes.set(xlabel="step", ylabel=f"seconds, mean of {WINDOW} steps", title="Time of a step")
    axes.set_ylim(bottom=0, top=1.35 * axes.get_ylim()[1])
    axes.legend(loc="upper right", frameon=False)
    axes.grid(alpha=0.25)


def _smooth(values: Sequence[float]) -> list[float]:
    return [
        sum(values[max(0, i - WINDOW + 1) : i + 1]) / len(values[max(0, i - WINDOW + 1) : i + 1])
        for i in range(len(values))
    ]


if __name__ == "__main__":
    print(draw_run(Path(sys.argv[1])))

"""What asynchrony does to learning: the demo task, synchronous, streaming on-policy and with a window of 1.

- `synchronous`: strictly on-policy, training begins when the whole batch is there; generation and training take turns
- `streaming`: strictly on-policy too, but each group is trained as it arrives; it computes the same updates
- `window1`: groups may be one version old, with truncated importance sampling; `window1_uncorrected` goes without

All start from one warm-started model and train the same number of samples. Runs of a seed share prompts and sampling
seeds. Every run is a process of its own, and modes take turns, so that a busy machine hits all alike. Finished runs are
kept in `--out` and not repeated: a benchmark that was interrupted goes on, and one with more seeds adds to it.

    python benchmarks/convergence.py                    # 3 modes, 3 seeds; draws docs/images/convergence.png
    python benchmarks/convergence.py --seeds 0 1 2 3    # one seed more
    python benchmarks/convergence.py --quick            # one seed, few steps, in a folder of its own; under a minute
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo"
PICTURE = ROOT / "docs" / "images" / "convergence.png"

WINDOW_1 = ("staleness.policy=windowed", "staleness.max_staleness=1")
MODES: Mapping[str, tuple[str, ...]] = {
    "synchronous": ("staleness.policy=on_policy", "training.min_groups_per_chunk=16"),
    "streaming": ("staleness.policy=on_policy", "training.min_groups_per_chunk=1"),
    "window1": (*WINDOW_1, "algorithm.correction.kind=tis"),
    "window1_uncorrected": WINDOW_1,
}
LAST = 10
"""Steps that a final reward is the mean of."""
TARGET = 0.9
"""Time is taken until a run reaches this share of the synchronous runs' final reward."""
T_QUANTILES = {2: 4.30, 4: 2.78, 6: 2.45, 8: 2.31}
"""Student's t, 97.5 %, by degrees of freedom: two modes with n seeds have 2 (n - 1)."""


@dataclass(frozen=True)
class Curve:
    """One run, step by step."""

    mode: str
    seed: int
    samples: list[int]
    """Trained so far."""
    seconds: list[float]
    """Since training began."""
    rewards: list[float]
    grad_norms: list[float]
    lags: list[float]
    eval_reward: float
    """On held-out prompts, after the last step."""

    @property
    def smooth_rewards(self) -> list[float]:
        return smooth(self.rewards, LAST)

    def reached(self, reward: float) -> int | None:
        """The first step whose mean of the last steps is that high."""
        return next((i for i, value in enumerate(self.smooth_rewards) if i >= LAST - 1 and value >= reward), None)


MEASURES: Mapping[str, Callable[[Curve], float]] = {
    "reward_area": lambda curve: statistics.mean(curve.rewards),
    "final_reward": lambda curve: statistics.mean(curve.rewards[-LAST:]),
    "final_eval": lambda curve: curve.eval_reward,
    "grad_norm": lambda curve: statistics.mean(curve.grad_norms),
    "seconds": lambda curve: curve.seconds[-1],
    "lag": lambda curve: statistics.mean(curve.lags),
}
"""What a run is summed up by; the area under the reward curve is over samples, as a mean."""
LEARNING = ("reward_area", "final_reward", "final_eval", "grad_norm")


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Means of the last so many values; of those there are, at the beginning."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(values))]


class Runs:
    """The runs that a folder keeps: a model, and one file per mode and seed."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, mode: str, seed: int) -> Path:
        return self._folder / f"{mode}-seed{seed}.json"

    def curve(self, mode: str, seed: int) -> Curve:
        """What the folder has; refuses runs of another length."""
        found = Curve(**json.loads(self.path(mode, seed).read_text(encoding="utf-8")))
        if len(found.rewards) != self._steps:
            raise SystemExit(
                f"{self.path(mode, seed)} has {len(found.rewards)} steps, not {self._steps}: choose another --out"
            )
        return found

    def make_model(self, quick: bool) -> None:
        """Warm-start the model that all runs begin with."""
        if not (self._folder / "model").exists():
            _in_own_process("--make-model", self._folder, *(["--quick"] if quick else []))

    def make(self, mode: str, seed: int) -> Curve:
        """The run, from the folder where it has it."""
        kept = self.path(mode, seed).exists()
        if not kept:
            _in_own_process("--run", mode, seed, "--steps", self._steps, "--out", self._folder)
        curve = self.curve(mode, seed)
        figures = {name: measure(curve) for name, measure in MEASURES.items()}
        print(
            f"{mode:<20} {seed:>4} {figures['reward_area']:>12.3f} {figures['final_reward']:>13.3f} "
            f"{figures['final_eval']:>11.3f} {figures['grad_norm']:>10.3f} {figures['lag']:>5.2f} "
            f"{figures['seconds']:>8.1f} s{'  (kept)' if kept else ''}",
            flush=True,
        )
        return curve


def _in_own_process(*arguments: object) -> None:
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")


def make_model(folder: Path, quick: bool) -> None:
    """The demo's model; `quick` stops the warm start early."""
    from penstock.runtime.cpu import let_idle_threads_sleep

    let_idle_threads_sleep()
    sys.path.insert(0, str(DEMO))
    from make_model import make_demo_model

    import penstock

    building = folder / "model.part"
    shutil.rmtree(building, ignore_errors=True)
    config = penstock.load_config(DEMO / "config.yaml", [f"model.path={building}"])
    make_demo_model(config, **({"skill_batches": 60, "habit_batches": 10} if quick else {}))
    building.rename(folder / "model")


def run(mode: str, seed: int, steps: int, out: Path) -> None:
    """Train, and write the curve into the folder."""
    from penstock.runtime.cpu import let_idle_threads_sleep

    let_idle_threads_sleep()
    import penstock

    with tempfile.TemporaryDirectory(dir=out) as work:
        overrides = (
            f"run_dir={work}/run",
            f"model.path={out / 'model'}",
            f"seed={seed}",
            f"training.max_steps={steps}",
        )
        quiet = ("eval.at_start=false", "checkpoint.at_end=false", "observe.console=off")
        result = penstock.train(penstock.load_config(DEMO / "config.yaml", [*overrides, *quiet, *MODES[mode]]))
        lines = (result.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "train/loss" in record]
    curve = Curve(
        mode=mode,
        seed=seed,
        samples=list(accumulate(int(record["train/sequences"]) for record in records)),
        seconds=[record["timing/elapsed_s"] for record in records],
        rewards=[record["train/reward_mean"] for record in records],
        grad_norms=[record["train/grad_norm"] for record in records],
        lags=[record["staleness/lag_mean"] for record in records],
        eval_reward=result.summary["eval/reward_mean"],
    )
    Runs(out, steps).path(mode, seed).write_text(json.dumps(asdict(curve)), encoding="utf-8")


def summary(curves: Sequence[Curve]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation over the seeds of one mode."""
    found = {}
    for name, measure in MEASURES.items():
        values = [measure(curve) for curve in curves]
        found[name] = {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else math.nan}
    return found


def compared(one: Sequence[Curve], other: Sequence[Curve], measure: Callable[[Curve], float]) -> dict[str, Any]:
    """The difference of two modes' means (other minus one), and how large it may be by the noise of seeds alone.

    That is Student's t times the pooled standard error: the 95 % interval of a difference between equal modes.
    """
    ones, others = [measure(curve) for curve in one], [measure(curve) for curve in other]
    seeds = min(len(ones), len(others))
    pooled = math.sqrt((statistics.variance(ones) + statistics.variance(others)) / seeds)
    difference = statistics.mean(others) - statistics.mean(ones)
    noise = T_QUANTILES.get(2 * (seeds - 1), 2.2) * pooled
    return {"difference": difference, "noise": noise, "within_noise": abs(difference) <= noise}


def streaming_matches_sync(sync: Sequence[Curve], streaming: Sequence[Curve]) -> dict[str, Any]:
    """Both are strictly on-policy, so rewards and gradient norms must not differ by more than seeds do.

    Before the first update they even have the same weights and samples: those gradient norms differ by rounding only.
    """
    found: dict[str, Any] = {name: compared(sync, streaming, MEASURES[name]) for name in LEARNING}
    first = [abs(b.grad_norms[0] / a.grad_norms[0] - 1) for a, b in zip(sync, streaming, strict=True)]
    matches = all(part["within_noise"] for part in found.values())
    return {"matches": matches, "first_grad_norm_relative_difference": max(first), **found}


def gain_vs_loss(sync: Sequence[Curve], other: Sequence[Curve]) -> dict[str, Any]:
    """Time to a given reward, and what is lost of the final one; the first must outweigh the second."""
    final = statistics.mean(map(MEASURES["final_reward"], sync))
    found: dict[str, Any] = {"target_reward": TARGET * final}
    for name, curves in (("sync", sync), ("window1", other)):
        steps = [curve.reached(TARGET * final) for curve in curves]
        reached = all(step is not None for step in steps)
        pairs = [(curve, step) for curve, step in zip(curves, steps, strict=True) if step is not None]
        found[f"{name}_seconds"] = statistics.mean(c.seconds[i] for c, i in pairs) if reached else None
        found[f"{name}_samples"] = statistics.mean(c.samples[i] for c, i in pairs) if reached else None
    found["final_reward"] = compared(sync, other, MEASURES["final_reward"])
    found["final_eval"] = compared(sync, other, MEASURES["final_eval"])
    gain = 1 - found["window1_seconds"] / found["sync_seconds"] if found["window1_seconds"] else None
    loss = max(0.0, -found["final_reward"]["difference"] / final)
    return found | {"time_gain": gain, "reward_loss": loss, "pays": gain is not None and gain >= loss}


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Reward and gradient norm against samples and wall time: the mean over seeds, and their range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex="col", sharey="row", layout="constrained")
    for row, (label, values) in enumerate((("reward", "rewards"), ("gradient norm", "grad_norms"))):
        axes[row, 0].set_ylabel(label)
        for column, x in enumerate(("samples", "seconds")):
            for mode, color in zip(curves, ("#444444", "#0072B2", "#D55E00", "#009E73"), strict=False):
                _band(axes[row, column], curves[mode], x, values, color)
            axes[row, column].grid(alpha=0.25)
            axes[row, column].margins(x=0)
    axes[0, 0].set_ylim(0, 1)
    axes[1, 0].set_ylim(bottom=0)
    axes[1, 0].set_xlabel("trained samples")
    axes[1, 1].set_xlabel("seconds of training")
    axes[0, 1].legend(loc="lower right", frameon=False)
    seeds = max(map(len, curves.values()))
    figure.suptitle(
        f"The demo task, means of {LAST} steps; line: mean of {seeds} seeds, band: their range", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _band(axes: Any, curves: Sequence[Curve], x: str, values: str, color: str) -> None:
    """Runs differ in their times, so all are read off at common places, as far as the shortest goes."""
    import numpy as np

    places = [np.asarray(getattr(curve, x), float) for curve in curves]
    grid = np.linspace(max(place[0] for place in places), min(place[-1] for place in places), 200)
    lines = [smooth(getattr(curve, values), LAST) for curve in curves]
    read = np.stack([np.interp(grid, place, line) for place, line in zip(places, lines, strict=True)])
    label = curves[0].mode.replace("_", ", ").replace("window1", "window 1")
    axes.fill_between(grid, read.min(0), read.max(0), color=color, alpha=0.18, linewidth=0)
    axes.plot(grid, read.mean(0), color=color, linewidth=1.8, label=label)


def benchmark(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    runs = Runs(out, options.steps)
    runs.make_model(options.quick)
    print(
        f"{'mode':<20} {'seed':>4} {'reward area':>12} {'final reward':>13} {'final eval':>11} {'grad norm':>10}   lag"
    )
    curves: dict[str, list[Curve]] = {mode: [] for mode in options.modes}
    for seed in options.seeds:
        for mode in options.modes:
            curves[mode].append(runs.make(mode, seed))
    found: dict[str, Any] = {"steps": options.steps, "seeds": options.seeds}
    found |= {mode: summary(made) for mode, made in curves.items()}
    if "synchronous" in curves and len(options.seeds) > 1:
        sync = curves["synchronous"]
        if "streaming" in curves:
            found["streaming_matches_sync"] = streaming_matches_sync(sync, curves["streaming"])
        for mode in ("window1", "window1_uncorrected"):
            if mode in curves:
                found[f"{mode}_gain_vs_loss"] = gain_vs_loss(sync, curves[mode])
    draw(curves, out / "convergence.png" if options.quick else options.picture)
    (out / "summary.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, nothing kept; under a minute")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["synchronous", "streaming", "window1"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "convergence", help="where runs are kept")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the picture goes")
    parser.add_argument("--make-model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make_model:
        make_model(options.make_model, options.quick)
    elif options.run:
        run(options.run[0], int(options.run[1]), options.steps, options.out)
    elif options.quick:
        options.seeds, options.steps = options.seeds[:1], 6
        with tempfile.TemporaryDirectory() as out:
            print(json.dumps(_rounded(benchmark(options, Path(out)))))
    else:
        print(json.dumps(_rounded(benchmark(options, options.out))))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.4g}")
    return value


if __name__ == "__main__":
    main()

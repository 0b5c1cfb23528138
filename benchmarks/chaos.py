"""A real run under random faults: what is lost (nothing), what is left behind (nothing), and what it costs.

The run is the product's own: `penstock train` with the embedded engine, a tiny Qwen3, a reasoning-gym task, the memory
data plane, the local trainer and checkpoints. Its parts fail at random: the engine raises, hangs or is slow; the reward
raises, hangs, is NaN, holds the interpreter lock for ever or ends its process; the trainer raises after a backward
pass, or at the end of a step before its optimizer; a write to the data plane fails. Now and then the process is killed
with SIGKILL and goes on with `penstock resume`. Once in a run nobody reads its display any more, once its engine, then
in a process of its own, is stopped with SIGSTOP, and once a byte of its newest checkpoint is flipped.

`--rate` is the share of calls of a part that each kind of fault strikes; besides, every process has each kind once
early on, if it lives that long. Which call fails is drawn from the seed. No prompt and no step is struck more often in
a process than half of its attempts, and no drop is allowed: one would end the run with an error, and count.

The same run without faults takes turns with the disturbed one. Ratios are medians over these pairs of trained samples
per second:

- `throughput_ratio`: of the time in which a process trained. All that faults cost counts, with the steps that are done
  again after a kill; the start-up of processes does not, nor the time until one notices that its engine is stopped.
- `throughput_ratio_with_restarts`: of the whole time, from the beginning of training to its end.

Ends with exit code 1 if a prompt was lost, trained twice or dropped, rows were left behind, or a fault ended a process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.support.chaos_faults import Kind
from benchmarks.support.chaos_outcome import Load, Outcome
from benchmarks.support.chaos_run import ChaosRun
from penstock.weights.hf import silence_progress_bars
from tests.support.tiny_models import save_tiny_model

WHAT = {
    Kind.ENGINE_RAISES: "engine raises",
    Kind.ENGINE_HANGS: "engine hangs",
    Kind.ENGINE_SLOW: "engine is slow",
    Kind.ENVIRONMENT_RAISES: "reward raises",
    Kind.ENVIRONMENT_HANGS: "reward hangs",
    Kind.ENVIRONMENT_NAN: "reward is NaN",
    Kind.REWARD_HOLDS_LOCK: "reward holds the interpreter lock",
    Kind.REWARD_EXITS: "reward ends its process",
    Kind.TRAINER_MICROBATCH: "trainer raises in a microbatch",
    Kind.TRAINER_FINISH: "trainer raises in finish",
    Kind.DATA_PLANE_PUT: "data-plane put fails",
    Kind.ENGINE_STOPPED: "engine stopped (SIGSTOP)",
    Kind.DISPLAY_LOST: "display lost",
    Kind.CHECKPOINT_FLIPPED: "checkpoint byte flipped",
}

Pair = tuple[Outcome, Outcome]
"""The undisturbed run and the disturbed one."""


def measure(folder: Path, load: Load, repeats: int) -> list[Pair]:
    """Pairs of runs; the seed of the faults, and of the run, differs from pair to pair."""
    silence_progress_bars()
    model = save_tiny_model(folder / "model", hidden=64, layers=2)
    pairs = []
    for repeat in range(repeats):
        each = replace(load, seed=load.seed + repeat)
        calm = ChaosRun(folder / f"calm{repeat}", model, each.undisturbed).execute()
        chaos = ChaosRun(folder / f"chaos{repeat}", model, each).execute()
        print(
            f"pair {repeat + 1}: {calm.samples_s:.1f} samples/s undisturbed in {calm.training_seconds:.1f} s, "
            f"{chaos.samples_s:.1f} disturbed in {chaos.training_seconds:.1f} s "
            f"({chaos.wall_seconds:.1f} s with restarts)"
        )
        pairs.append((calm, chaos))
    return pairs


def figures(pairs: list[Pair], load: Load) -> dict[str, Any]:
    """The line of JSON: counts over all disturbed runs, medians over pairs."""
    runs = [chaos for _, chaos in pairs]
    by_kind: Counter[str] = sum((run.faults for run in runs), Counter())
    events: Counter[str] = sum((run.events for run in runs), Counter())
    totals = {
        name: sum(getattr(run, name) for run in runs)
        for name in ("kills", "survived", "dropped", "lost", "twice", "rows_left")
    }
    return {
        "faults": by_kind.total(),
        **totals,
        "throughput_ratio": round(statistics.median(chaos.samples_s / calm.samples_s for calm, chaos in pairs), 3),
        "throughput_ratio_with_restarts": round(
            statistics.median(chaos.samples_s_with_restarts / calm.samples_s_with_restarts for calm, chaos in pairs), 3
        ),
        "by_kind": {kind.value: by_kind[kind.value] for kind in Kind},
        "rate": load.rate,
        "prompts": load.visits * len(runs),
        "samples": sum(run.samples for run in runs),
        "rollouts_retried": events["rollout_retried"],
        "steps_replayed": events["step_replayed"],
        "runs": len(runs),
    }


def show(pairs: list[Pair], result: dict[str, Any]) -> None:
    """The table."""
    fatal: Counter[str] = sum((chaos.fatal for _, chaos in pairs), Counter())
    table = Table(title=f"disturbed runs: {result['runs']}, prompts: {result['prompts']}, rate: {result['rate']}")
    table.add_column("fault")
    table.add_column("injected", justify="right")
    table.add_column("survived", justify="right")
    for kind, what in WHAT.items():
        injected = result["by_kind"][kind.value]
        table.add_row(what, str(injected), str(injected - fatal[kind.value]))
    table.add_row("process killed", str(result["kills"]), str(result["kills"]), end_section=True)
    for key, what in {
        "lost": "prompts lost",
        "twice": "prompts twice",
        "dropped": "prompts dropped",
        "rows_left": "rows left in the data plane",
        "throughput_ratio": "throughput against undisturbed",
        "throughput_ratio_with_restarts": "the same, with restarts",
    }.items():
        table.add_row(what, str(result[key]), "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of short runs with three kills; about a minute")
    parser.add_argument("--rate", type=float, default=0.003, help="share of calls that each kind strikes")
    parser.add_argument("--kills", type=int, help="kills in each disturbed run; 3 with --quick, else 6")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 < options.rate < 1:
        parser.error("--rate is above 0 and below 1; each process has one fault of each kind in any case")
    kills = options.kills if options.kills is not None else (3 if options.quick else 6)
    load = Load(224 if options.quick else 480, 2, kills, options.rate, options.seed)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder:
        pairs = measure(Path(folder), load, 1 if options.quick else 3)
    result = figures(pairs, load)
    show(pairs, result)
    wrong = [f"undisturbed run: {each}" for calm, _ in pairs for each in calm.untrue(load.undisturbed)]
    wrong += [f"disturbed run: {each}" for _, chaos in pairs for each in chaos.untrue(load)]
    for each in wrong:
        print(each, file=sys.stderr)
    print(json.dumps(result))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""The demo: make a tiny model, train it with streaming asynchronous GRPO on the CPU, and show what was reached.

Run it with `make demo`. It writes to `runs/demo` and `runs/demo-model`, and starts from nothing every time.
`make demo-processes` is the same run spread over several processes; it writes to `runs/demo-processes`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.cpu import let_idle_threads_sleep

let_idle_threads_sleep()

from make_model import make_demo_model  # noqa: E402 - after the threads are told how to wait
from picture import draw_run  # noqa: E402

import penstock  # noqa: E402
from penstock.config.models import RunConfig  # noqa: E402
from penstock.run.commands import resume_command  # noqa: E402
from penstock.weights.hf import silence_progress_bars  # noqa: E402

LEAST_EVAL_REWARD, LEAST_GAIN = 0.8, 2.0


def run_demo(here: Path, make_model: Callable[[RunConfig], str]) -> int:
    """Run the demo of a folder; 0 when the model learned what it should."""
    started = time.monotonic()
    silence_progress_bars()
    config = penstock.load_config(here / "config.yaml", sys.argv[1:])
    own = penstock.load_config(here / "config.yaml")
    own_run_dirs = (own.run_dir, f"{own.run_dir}-processes")
    if config.run_dir not in own_run_dirs or config.model.path != own.model.path:
        print("the demo starts from nothing each time: it does not touch folders other than its own")
        return 2
    for folder in (config.run_dir, own.model.path):
        if Path(folder).exists():
            print(f"removing {folder} of an earlier demo")
            shutil.rmtree(folder)
    print("making the model ...", flush=True)
    print(make_model(config))
    result = penstock.train(config)
    if result.stopped_by == "interrupted":
        print(f"interrupted after {result.summary['steps']} steps; what there is is in {result.run_dir}")
        print(f"Resume with: .venv/bin/{resume_command(result.run_dir)}")
        return 130
    picture = draw_run(result.run_dir)
    summary = result.summary
    print(
        f"""
Reward of sampled answers    {summary["train/reward_mean_start"]:.2f} at the start, \
{summary["train/reward_mean_end"]:.2f} at the end
Held-out prompts, greedy     {summary["eval/reward_mean_start"]:.2f} at the start, \
{summary["eval/reward_mean"]:.2f} at the end
Training                     {summary["steps"]} steps, {summary["rollout/tokens_generated"]:,} tokens, \
{summary["timing/elapsed_s"]:.0f} s ({time.monotonic() - started:.0f} s with everything)

Everything is in {result.run_dir}:
  report.html      a page about the run: open it in a browser
  trace.json       its timeline: open it in Perfetto
  summary.json     how it ended
  metrics.jsonl    one line per step
  events.jsonl     weight versions, retries, drops
  checkpoints/     the trained model; load it with transformers
  {picture.name:<16} the picture
Try next:  .venv/bin/penstock eval {result.run_dir}"""
    )
    learned = (
        summary["train/reward_mean_end"] >= LEAST_GAIN * summary["train/reward_mean_start"]
        and summary["eval/reward_mean"] > LEAST_EVAL_REWARD
    )
    if not learned:
        print(f"\nIt should have doubled its reward and passed {LEAST_EVAL_REWARD} on held-out prompts: it did not.")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(run_demo(Path(__file__).resolve().parent, make_demo_model))

"""The tools demo: a tiny model learns, by reinforcement, to use a calculator instead of guessing.

Run it with `python examples/tools/demo.py`. It writes to `runs/tools` and `runs/tools-model`, and starts from nothing
every time.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from penstock.runtime.cpu import let_idle_threads_sleep

let_idle_threads_sleep()

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "demo"))

from picture import draw_run  # noqa: E402 - of the first demo
from warm_start import make_tools_model  # noqa: E402 - after the threads are told how to wait

import penstock  # noqa: E402
from penstock.weights.hf import silence_progress_bars  # noqa: E402

LEAST_EVAL_REWARD, LEAST_GAIN = 0.8, 2.0


def main() -> int:
    """Run the demo; 0 when the model learned what it should."""
    started = time.monotonic()
    silence_progress_bars()
    config = penstock.load_config(HERE / "config.yaml", sys.argv[1:])
    own = penstock.load_config(HERE / "config.yaml")
    if (config.run_dir, config.model.path) != (own.run_dir, own.model.path):
        print("the demo starts from nothing each time: it does not touch folders other than its own")
        return 2
    for folder in (own.run_dir, own.model.path):
        if Path(folder).exists():
            print(f"removing {folder} of an earlier demo")
            shutil.rmtree(folder)
    print("making the model ...")
    print(make_tools_model(config))
    result = penstock.train(config)
    if result.stopped_by == "interrupted":
        print(f"interrupted after {result.summary['steps']} steps; what there is is in {result.run_dir}")
        return 130
    picture = draw_run(result.run_dir)
    summary = result.summary
    print(
        f"""
Reward of sampled answers    {summary["start_reward"]:.2f} at the start, {summary["end_reward"]:.2f} at the end
Held-out prompts, greedy     {summary["eval_reward_start"]:.2f} at the start, {summary["eval_reward"]:.2f} at the end
Training                     {summary["steps"]} steps, {summary["tokens_generated"]:,} tokens, \
{summary["train_seconds"]:.0f} s ({time.monotonic() - started:.0f} s with everything)

Everything is in {result.run_dir}; {picture.name} is the picture."""
    )
    learned = (
        summary["end_reward"] >= LEAST_GAIN * summary["start_reward"] and summary["eval_reward"] > LEAST_EVAL_REWARD
    )
    if not learned:
        print(f"\nIt should have doubled its reward and passed {LEAST_EVAL_REWARD} on held-out prompts: it did not.")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())

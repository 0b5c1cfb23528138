"""What the evaluations of a run amount to: the same figures in `summary.json` and in the report."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.observe.report.values import number

EVAL_REWARD = "eval/reward_mean"


def eval_figures(evals: Mapping[int, Mapping[str, object]]) -> dict[str, float | None]:
    """The figures of evaluations by step: the last one, with its step, and that of the initial weights.

    The last one is `eval/reward_mean`, even if it is the only one; `eval/reward_mean_start` is the one at step 0.
    """
    rewards = {step: value for step, line in evals.items() if (value := number(line.get(EVAL_REWARD))) is not None}
    last = max(rewards, default=None)
    return {
        f"{EVAL_REWARD}_start": rewards.get(0),
        EVAL_REWARD: None if last is None else rewards[last],
        "eval/step": last,
    }

"""A finished run that is resumed: recognized from its files alone, before anything is opened or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from penstock.config.models import RunConfig
from penstock.observe.display import Display
from penstock.observe.report.reading import Lines, read_object
from penstock.run.announcements import tell_nothing_left
from penstock.run.directory import RunDirectory
from penstock.run.result import RunResult
from penstock.run.resume import ResumePoint

_BY_ITSELF = ("max_steps", "data_exhausted", "early_stop")
_EARLY_STOP = "training.early_stop"
_DECIDE_DATA = ("data", "rollout.environment")
"""Sections that decide how many prompts there are."""


def finished_run(
    directory: RunDirectory, config: RunConfig, point: ResumePoint, json_to: TextIO | None = None
) -> RunResult | None:
    """How the run ended, if nothing is left to train or to evaluate; None if it must be set up to find out.

    Changes no file. A run is finished if its summary is from the checkpoint's step, it ended by itself, and the
    settings that ended it are still there. Example: a run that reached `training.max_steps = 3` is not finished when it
    is resumed with `training.max_steps=5`, and neither is one whose last process was killed before it wrote a summary.
    """
    summary = read_object(directory.summary)
    if summary is None or not _ended_here(summary, directory, point):
        return None
    due = config.eval.at_end or (config.eval.every_steps and point.step % config.eval.every_steps == 0)
    if due and not _evaluated(directory, point.step):
        return None
    early = summary.get("early_stop_reason")
    stopped_early = early is not None and config.training.early_stop is not None and not _changed(point, _EARLY_STOP)
    if not stopped_early and not _has_no_steps(summary, config, point):
        return None
    view = Display(config.observe.console, config.training.max_steps, lambda event, /, **fields: None, json_to)
    view.open()
    try:
        words = tell_nothing_left(view, config, point.step, early if stopped_early else None)
    finally:
        view.close()
    return RunResult(summary, directory.path, str(summary["stopped_by"]), words)


def _ended_here(summary: Mapping[str, Any], directory: RunDirectory, point: ResumePoint) -> bool:
    """Whether the summary belongs to this run, at the checkpoint's step, with an end that needs no resume."""
    is_own = summary.get("run_id") == directory.run_id and summary.get("steps") == point.step
    by_itself = summary.get("stopped_by") in _BY_ITSELF and not summary.get("error")
    return point.checkpoint is not None and point.step > 0 and is_own and by_itself and not point.superseded


def _evaluated(directory: RunDirectory, step: int) -> bool:
    return any(line.get("step") == step and "eval/reward_mean" in line for line in Lines(directory.metrics))


def _has_no_steps(summary: Mapping[str, Any], config: RunConfig, point: ResumePoint) -> bool:
    """Whether the checkpoint's step is the last one that these settings ask for."""
    wanted = config.training.max_steps
    if wanted is not None and point.step >= wanted:
        return True
    return summary["stopped_by"] == "data_exhausted" and not _changed(point, *_DECIDE_DATA)


def _changed(point: ResumePoint, *sections: str) -> bool:
    """Whether a setting in one of these sections differs from the checkpoint's."""
    return any(change.key == name or change.key.startswith(f"{name}.") for change in point.changes for name in sections)

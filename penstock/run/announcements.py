"""What a run tells a person, and its events, about its own beginning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.config.models import RunConfig
from penstock.config.sections.staleness import WindowedStaleness
from penstock.observe.display import Display
from penstock.observe.event_kinds import meaning_of
from penstock.run.build import Training
from penstock.run.given_objects import way_to_resume
from penstock.run.problems import Level, Problem
from penstock.run.resume import ResumePoint
from penstock.run.run_log import RunLog


def tell_resume(log: RunLog, point: ResumePoint, run_id: str) -> None:
    """Where the run is about to continue, and with which settings."""
    log.events.emit("run_resumed", step=point.step, ended_prompts=point.ended_prompts, run_id=run_id)
    log.view.note(
        "no checkpoint was complete: starting from scratch"
        if point.checkpoint is None
        else f"resuming after step {point.step}, from {point.checkpoint}"
    )
    if point.changes:
        changed = [str(change) for change in point.changes]
        log.events.emit("settings_changed", step=point.step, changes=changed)
        log.view.note(f"settings changed since step {point.step}: {', '.join(changed)}")


def tell_set_aside(log: RunLog, point: ResumePoint) -> None:
    """Which checkpoints the run has set aside because it does not continue from them."""
    if point.superseded:
        log.events.emit("checkpoints_set_aside", step=point.step, folders=list(point.superseded))
        log.view.note(f"moved aside, to aside_step_N: {', '.join(point.superseded)}")


def tell_warnings(log: RunLog, warnings: Sequence[Problem]) -> None:
    """What the checks before the run found that does not keep it from starting."""
    for warning in warnings:
        log.events.emit("warning", key=warning.key, reason=warning.reason)
        log.view.note(f"warning: {warning}")


def tell_saved(log: RunLog, step: int, path: Path, seconds: float) -> None:
    """A checkpoint is complete."""
    log.events.emit("checkpoint_saved", step=step, path=str(path), seconds=round(seconds, 3))
    log.view.note(f"checkpoint saved after step {step}: {path}")


def tell_nothing_left(view: Display, config: RunConfig, steps: int, early: object) -> str:
    """A resumed run has no steps left; returns why, with the command that trains further.

    `early` is why it stopped early, or None if it did not.
    """
    if early is not None:
        why, more = f"it stopped early because {early}", "training.early_stop=null"
    elif config.training.max_steps is not None and config.training.max_steps <= steps:
        why = f"it reached training.max_steps = {config.training.max_steps}"
        more = f"training.max_steps={2 * steps}"
    else:
        why, more = "it reached the end of its data", f"data.epochs={config.data.epochs + 1}"
    view.note(f"nothing left to train: this run already finished at step {steps}")
    return (
        f"This run already finished at step {steps}: {why}. Nothing was trained. To train further: "
        f"{way_to_resume(config, config.run_dir, more)}"
    )


def tell_evictions(log: RunLog, config: RunConfig) -> None:
    """At the end: say so if most of what was generated became too stale to train on."""
    evicted, trained = log.metrics.groups_evicted, log.metrics.groups_trained
    if evicted <= trained:
        return
    room = f"lower buffer.max_buffered_groups (now {config.buffer.max_buffered_groups})"
    over_sampling = isinstance(config.staleness, WindowedStaleness) and config.staleness.over_sampling
    key, change = (
        ("staleness.over_sampling", f"set it to false, or {room}")
        if over_sampling
        else ("buffer.max_buffered_groups", f"{room}, or allow more staleness")
    )
    ratio = f", {evicted / trained:.1f} for each one trained" if trained else ""
    reason = f"{evicted:,} groups became too stale and were evicted, and {trained:,} were trained{ratio}; {change}"
    tell_warnings(log, [Problem(Level.WARNING, key, reason)])


def tell_plan(log: RunLog, config: RunConfig, training: Training) -> None:
    """How many steps there will be, whether the data ends early, and what else is worth knowing beforehand."""
    log.view.expect(training.steps)
    for note in training.notes:
        log.view.note(note)
    wanted = config.training.max_steps
    if wanted is not None and training.steps < wanted:
        log.view.note(
            f"the data ends after {training.steps} steps, before training.max_steps = {wanted}; raise data.epochs "
            "or data.train_size for more"
        )


def tell_event(log: RunLog, event: str, **fields: str) -> None:
    """An event that is also shown to a person, in its own words."""
    log.events.emit(event, **fields)
    log.view.note(f"{meaning_of(event) or event} ({', '.join(fields.values())})")

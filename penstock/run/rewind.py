"""A run's own files, rolled back to a checkpoint: what happened after it happens again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.errors import SetupError
from penstock.observe.jsonl import writing
from penstock.observe.report.reading import Lines
from penstock.run.aside import free_name
from penstock.run.checkpoint_folders import draft_of, remove_drafts, set_aside, superseded
from penstock.run.directory import RunDirectory

Keep = Callable[[int, bytes], bool]
"""Whether the line at this position, counted from 0, is kept."""


def refuse_lost_checkpoints(directory: RunDirectory) -> None:
    """Raise `SetupError` if there is no checkpoint to resume from, but the run had one.

    A process that was killed just before its first checkpoint got its name has left the draft: it had none.
    """
    first = directory.first_checkpoint
    had = first is not None and not draft_of(directory.checkpoints / first).is_dir()
    if had or any(line.get("event") == "checkpoint_saved" for line in Lines(directory.events)):
        raise SetupError(
            f"{str(directory.checkpoints)!r} has no complete checkpoint, but this run has saved some: they were moved "
            "or deleted. Put them back and resume again; or start over, with the rest of this run moved aside: "
            f"penstock resume {directory.path} --from-scratch"
        )


def rewind(directory: RunDirectory, step: int | None, ended_prompts: int, *, same_process: bool = False) -> None:
    """Keep what was there when `step` and this many prompts had ended; None keeps nothing.

    `events.jsonl` is kept whole: it is the history of all processes of the run. The timeline of the process that ended
    is set aside, as it has its own clock; with `same_process` it goes on. Checkpoints of later steps are set aside
    first, so even if this is interrupted, no checkpoint is ahead of the files.
    """
    if step is None:
        directory.begins_anew()
    else:
        directory.checkpoint_appears(f"step_{step}")
    for path in superseded(directory.checkpoints, step or 0):
        with writing(path):
            set_aside(path)
    for path in (directory.metrics, directory.samples):
        _keep_lines(path, lambda place, line: step is not None and (at := _step(line)) is not None and at <= step)
    _keep_lines(directory.ledger, lambda place, line: place < ended_prompts)
    if directory.trace.exists() and not same_process:
        with writing(directory.trace):
            directory.trace.rename(free_name(directory.trace))
    for path in (directory.summary, directory.report):
        with writing(path):
            path.unlink(missing_ok=True)
    remove_drafts(directory.checkpoints)


def _keep_lines(path: Path, keep: Keep) -> None:
    """Rewrite the file with some of its lines, atomically; a line torn by a kill is left out."""
    if not path.exists():
        return
    draft = path.with_name(f".{path.name}.writing")
    with writing(path):
        with draft.open("wb") as file:
            file.writelines(line for place, line in enumerate(_whole_lines(path)) if keep(place, line))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _step(line: bytes) -> int | None:
    """None for a line that is not a record, as a power cut can leave."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None

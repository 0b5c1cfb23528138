"""A dry write: proves, before the first step, that a checkpoint of this run can be written, read back and verified."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from penstock.config.models import CheckpointConfig
from penstock.config.reading.loading import load_config
from penstock.controller.bookkeeping.snapshot import SavedController
from penstock.controller.controller import SingleController
from penstock.errors import CheckpointError
from penstock.run.checkpoint import CONTROLLER_FOLDER, SETTINGS_FILE, CheckpointStore, Snapshot
from penstock.run.checkpoint_check import damage
from penstock.run.run_log import RunLog
from penstock.runtime.threads import in_daemon_thread
from penstock.training.interface import Trainer

_GIGABYTE = 1e9


async def prove_checkpoint(
    config: CheckpointConfig,
    store: CheckpointStore,
    step: int,
    controller: SingleController,
    trainer: Trainer,
    log: RunLog,
) -> None:
    """Write the run's current state, check it as a resume would, and remove it; `CheckpointError` if that fails.

    Comes before a resume is accepted: a resume refused here leaves every file of the run as it was. Does nothing in a
    run that writes no checkpoints. Too little room for the first real one is only a note: others may free disk space
    by then.
    """
    if config.every_steps is None and config.every_minutes is None and not config.at_end:
        return
    started = time.monotonic()
    with log.track.span("testing that a checkpoint can be written", step=step):
        snapshot = Snapshot(step, await trainer.snapshot(), await controller.snapshot(), None)
        size = await write_and_read_off_the_loop(store, snapshot)
    log.events.emit("checkpoint_proved", step=step, bytes=size, seconds=round(time.monotonic() - started, 3))
    needed = size + snapshot.trainer.bytes_to_come
    free = store.free_bytes()
    if free < needed:
        log.view.note(
            f"! there may be no room for the first checkpoint: it needs about {needed / _GIGABYTE:.1f} GB, and "
            f"{free / _GIGABYTE:.1f} GB are free"
        )


async def write_and_read_off_the_loop(store: CheckpointStore, snapshot: Snapshot) -> int:
    """Write in a thread, so Ctrl-C is heard; the folder is gone when this ends.

    If a disk hangs, the thread is left behind after the store's limit, with the folder: `CheckpointError`, even if
    the wait was only because of a Ctrl-C.
    """
    writing = in_daemon_thread("penstock-proof", _write_and_read, store, snapshot)
    waiting = asyncio.ensure_future(store.within_limit(writing, "no test checkpoint was written"))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait({waiting})
        with contextlib.suppress(CheckpointError):  # how it ended no longer matters
            waiting.result()
        raise


def _write_and_read(store: CheckpointStore, snapshot: Snapshot) -> int:
    try:
        return store.written_for_proof(snapshot, lambda folder, run_id: _look(folder, run_id, snapshot))
    except Exception as error:  # whatever it is, it would happen again after the first step
        cause = " ".join((str(error) or type(error).__name__).split()).rstrip(".")
        raise CheckpointError(
            f"no checkpoint could be written to {str(store.folder)!r}: {cause}. This was tested before the first step, "
            "so nothing is lost; fix this, or train without checkpoints (checkpoint.at_end=false "
            "checkpoint.every_minutes=null, no checkpoint.every_steps)"
        ) from error


def _look(folder: Path, run_id: str, snapshot: Snapshot) -> None:
    """What a resume does with a checkpoint before it touches anything."""
    problems = damage(folder, run_id, snapshot.step)
    if problems:
        raise CheckpointError(f"what was written does not read back: {'; '.join(problems)}")
    load_config(folder / SETTINGS_FILE)
    saved = SavedController.read(folder / CONTROLLER_FOLDER)
    if saved.rows is not None and snapshot.controller.rows is not None:
        snapshot.controller.rows.inspect(saved.rows)

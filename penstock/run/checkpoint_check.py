"""Whether a checkpoint is what was written: checked before anything in it is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from penstock.errors import SetupError
from penstock.run.checkpoint_folders import checkpoints, step_of
from penstock.run.file_digests import file_digests
from penstock.run.seal import SEAL, BrokenSeal, Seal, SealedFile, entries
from penstock.weights.pickles import is_pickle

_SHOWN = 5


Fits = Callable[[Path], bool]
"""Whether a checkpoint fits what else the command needs."""


def require_good(checkpoint: Path, run_id: str, command: str, fits: Fits = lambda path: True) -> None:
    """Raise `SetupError` if a checkpoint of the run is damaged or not its own, naming the files and a way forward.

    The way forward is the newest other good checkpoint that `fits`: `command` (`resume`, `eval`) with `--checkpoint`.
    Others are read only if this one is damaged, newest first.
    """
    problems = damage(checkpoint, run_id, step_of(checkpoint))
    if not problems:
        return
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    lines = [f"checkpoint {checkpoint.name} in {str(checkpoint.parent)!r} cannot be used:"]
    raise SetupError("\n  ".join([*lines, *problems[:_SHOWN], *more, way_on(checkpoint, run_id, command, fits)]))


def damage(folder: Path, run_id: str, step: int) -> list[str]:
    """What keeps a folder from being the checkpoint of this run and step, one line per file; empty if it is good.

    Names and sizes are compared first. If these are right, content is read, as bytes only.
    """
    try:
        seal = Seal.read(folder)
    except BrokenSeal as broken:
        return [f"{SEAL}: {broken}"]
    problems = [*_of_another(seal, run_id, step), *_wrong_files(folder, seal)]
    return problems or _wrong_content(folder, seal)


def _of_another(seal: Seal, run_id: str, step: int) -> list[str]:
    found = []
    if seal.run_id != run_id:
        found.append(f"{SEAL}: belongs to another run ({seal.run_id}; this one is {run_id})")
    if seal.step != step:
        found.append(f"{SEAL}: is of step {seal.step}, not {step}: the folder was copied or renamed")
    return found


def _wrong_files(folder: Path, seal: Seal) -> list[str]:
    there = entries(folder)
    missing = [f"{name}: is missing" for name in seal.files if name not in there]
    extra = [f"{name}: {_stranger(name)}" for name in there if name not in seal.files]
    odd = [
        f"{name}: {problem}"
        for name, sealed in seal.files.items()
        if name in there and (problem := _odd(there[name], sealed)) is not None
    ]
    return [*missing, *extra, *odd]


def _stranger(name: str) -> str:
    if is_pickle(name):
        return "is a pickle, which can run any code when it is opened; no checkpoint has one"
    return "is not a file of this checkpoint; remove it"


def _odd(path: Path, sealed: SealedFile) -> str | None:
    facts = os.lstat(path)
    if not stat.S_ISREG(facts.st_mode):
        return "is no longer a regular file"
    if facts.st_size != sealed.size:
        return f"has {facts.st_size} bytes, but {sealed.size} were written"
    return None


def _wrong_content(folder: Path, seal: Seal) -> list[str]:
    try:
        digests = file_digests(folder, seal.files)
    except OSError as error:
        name = Path(error.filename).relative_to(folder).as_posix() if error.filename else "a file"
        return [f"{name}: cannot be read ({error.strerror})"]
    return [
        f"{name}: its content has changed since it was written"
        for name, sealed in seal.files.items()
        if digests[name] != sealed.digest
    ]


def way_on(checkpoint: Path, run_id: str, command: str, fits: Fits) -> str:
    """What to do instead of using a checkpoint: the newest other one that is good, with the command."""
    others = [path for path in reversed(checkpoints(checkpoint.parent)) if path.name != checkpoint.name]
    good = next((path for path in others if fits(path) and not damage(path, run_id, step_of(path))), None)
    if good is None:
        return "No other checkpoint of the run can be used."
    run_dir = checkpoint.parent.parent
    return f"The newest good one is {good.name}: penstock {command} {run_dir} --checkpoint {good.name}"

"""`records.json` of a checkpoint: which run it belongs to, and what the run's files held when it was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from penstock.errors import SetupError
from penstock.observe.jsonl import FileMark, mark_of
from penstock.observe.report.reading import Lines
from penstock.run.checkpoint_check import way_on
from penstock.run.directory import RunDirectory

FILE_NAME = "records.json"


class _Mark(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    size: NonNegativeInt
    digest: str


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    run_id: str
    files: dict[str, _Mark]


@dataclass(frozen=True)
class FilesSnapshot:
    """The run's files at the moment of a checkpoint."""

    run_id: str
    marks: Mapping[str, FileMark]
    """By the file's name in the run directory."""
    sync: Callable[[], None]
    """Flushes the files to disk; blocks."""

    def write(self, folder: Path) -> None:
        """Write the marks into a checkpoint's folder, once what they describe is on disk; blocks, from any thread."""
        self.sync()
        files = {name: _Mark(**asdict(mark)) for name, mark in self.marks.items()}
        text = _Content(run_id=self.run_id, files=files).model_dump_json(indent=1)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def refuse_other_files(directory: RunDirectory, checkpoint: Path) -> None:
    """Raise `SetupError` if the checkpoint, or a file of the run, belongs to another run or was shortened or changed.

    `samples.jsonl` is not checked: nothing depends on it, so it may have been deleted and started again since.
    """
    content = _read(checkpoint)
    if content.run_id != directory.run_id:
        raise SetupError(
            f"checkpoint {str(checkpoint)!r} belongs to another run ({content.run_id}) than the folder it is in "
            f"({directory.run_id}). Move it back to its own run, and {_WAY_OUT.format(directory.path)}"
        )
    problem = next(_problems(directory, content), None)
    if problem is not None:
        older = way_on(checkpoint, directory.run_id, "resume", lambda path: files_fit(directory, path))
        raise SetupError(
            f"{problem}, so it does not belong to checkpoint {checkpoint.name}. {older} You can also "
            f"put the run's own file back, and {_WAY_OUT.format(directory.path)}"
        )


def files_fit(directory: RunDirectory, checkpoint: Path) -> bool:
    """Whether the run's files still hold what they held when the checkpoint was taken."""
    try:
        content = _read(checkpoint)
    except SetupError:
        return False
    return content.run_id == directory.run_id and next(_problems(directory, content), None) is None


def _problems(directory: RunDirectory, content: _Content) -> Iterator[str]:
    for name, mark in content.files.items():
        path = directory.path / name
        if path != directory.samples and (problem := _problem(path, mark)) is not None:
            yield f"{str(path)!r} {problem}"


def refuse_other_events(directory: RunDirectory) -> None:
    """Raise `SetupError` if `events.jsonl` begins with another run's id."""
    ids = (
        line["run_id"] for line in Lines(directory.events) if line.get("event") == "run_started" and "run_id" in line
    )
    found = next(ids, directory.run_id)
    if found != directory.run_id:
        raise SetupError(
            f"{str(directory.events)!r} is the history of another run ({found}, not {directory.run_id}). Put the run's "
            f"own file back or delete this one, and {_WAY_OUT.format(directory.path)}"
        )


_WAY_OUT = "resume again; or start over, with this run moved aside: penstock resume {} --from-scratch"


def _problem(path: Path, mark: _Mark) -> str | None:
    try:
        found = mark_of(path, mark.size)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not path.exists() and mark.size:
        return f"is gone; it had {mark.size:,} bytes"
    if found.size < mark.size:
        return f"is shorter than it was: {found.size:,} bytes instead of {mark.size:,}"
    return None if found.digest == mark.digest else f"has different content in its first {mark.size:,} bytes"


def _read(checkpoint: Path) -> _Content:
    path = checkpoint / FILE_NAME
    try:
        return _Content.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise SetupError(
            f"{str(path)!r}, which ties the checkpoint to its run, cannot be read: {reason}. Put it back, and "
            + _WAY_OUT.format(checkpoint.parent.parent)
        ) from error

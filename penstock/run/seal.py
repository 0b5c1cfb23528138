"""The seal of a checkpoint, `penstock.json`: its run, its step, and what every file in it must be."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.run.file_digests import file_digests

SEAL = "penstock.json"
"""Written last."""
_DRAFT = f".{SEAL}"
_FORMAT = 2


class BrokenSeal(Exception):
    """A seal that cannot be relied on; the text goes after its file name."""


@dataclass(frozen=True)
class SealedFile:
    """What a file was when it was written."""

    size: int
    digest: str


@dataclass(frozen=True)
class Seal:
    """What is known about a complete checkpoint.

    The file counts as intact only if it is, byte for byte, what `write` produces from its content, which includes a
    digest of the rest: so a seal proves itself too.
    """

    run_id: str
    step: int
    files: Mapping[str, SealedFile]
    """By path inside the checkpoint, with `/`; the seal itself is not among them."""
    metric: str
    """`checkpoint.best_metric` of the run."""
    value: float | None
    """The metric's value, if it is known."""

    @classmethod
    def of(
        cls,
        folder: Path,
        run_id: str,
        step: int,
        metric: str,
        value: float | None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Seal:
        """The seal of a folder's current content; reads it all and calls `on_progress`, from any thread, as it goes."""
        names = [name for name, path in entries(folder).items() if path.is_file()]
        digests = file_digests(folder, names, on_progress)
        files = {name: SealedFile((folder / name).stat().st_size, digests[name]) for name in names}
        return cls(run_id, step, files, metric, value)

    @classmethod
    def read(cls, folder: Path) -> Seal:
        """The seal of a checkpoint; `BrokenSeal` says what is wrong with it."""
        try:
            content = (folder / SEAL).read_bytes()
            seal = _parse(json.loads(content))
        except FileNotFoundError:
            raise BrokenSeal("is missing") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenSeal(f"cannot be read ({error or type(error).__name__})") from None
        if seal._text().encode() != content:
            raise BrokenSeal("its content has changed since it was written")
        return seal

    def write(self, folder: Path) -> None:
        """Write the seal into a folder, replacing an older one; whole or not at all."""
        draft = folder / _DRAFT
        with draft.open("w", encoding="utf-8") as file:
            file.write(self._text())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / SEAL)

    @property
    def finite_value(self) -> float | None:
        """The metric's value, if there is one that can be compared."""
        return self.value if self.value is not None and math.isfinite(self.value) else None

    def _text(self) -> str:
        content: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps(content | {"digest": digest}, indent=1) + "\n"


def _parse(content: Any) -> Seal:
    if "files" not in content:
        raise BrokenSeal("has no digests of the checkpoint's files, so they cannot be verified; it cannot be used")
    if content["format"] != _FORMAT:
        raise BrokenSeal(f"has format {content['format']}, but this version of Penstock reads {_FORMAT}")
    files = {name: SealedFile(**facts) for name, facts in content["files"].items()}
    return Seal(content["run_id"], content["step"], files, content["metric"], content["value"])


def entries(folder: Path) -> dict[str, Path]:
    """Everything in a checkpoint except folders and its seal, by path inside it; links are not followed.

    The draft of a seal, which a kill can leave, counts as the seal.
    """
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for path in (Path(place) / name for name in (*names, *links)):
            found[path.relative_to(folder).as_posix()] = path
    return {name: found[name] for name in sorted(found) if name not in (SEAL, _DRAFT)}

"""Recorded rollouts on disk: the groups of a run, to be trained on again without an engine.

Layout of a run's `rollouts/` folder:

    recording.json                     `RecordingInfo`: the settings and the tokenizer that all groups have in common
    <epoch>-<prompt id>-<digest>/      one group: `group.json` (`RecordedGroup`) and its rows (`data_plane.archive`)
    .draft-…                           a group that is being written; never read
    .replaced-…                        the older record of a group that is being replaced; read until the newer is there
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from penstock.errors import ConfigError, RecordError, SetupError
from penstock.observe.jsonl import writing
from penstock.rollout.environments.extra_columns import ExtraColumn
from penstock.text import safe_value

if TYPE_CHECKING:
    from penstock.data_plane.client import SampleBatch

FOLDER = "rollouts"
"""In the run directory."""
_INFO, _GROUP = "recording.json", "group.json"
_DRAFT, _REPLACED = ".draft-", ".replaced-"
_READABLE = 40
"""Characters of a prompt id that a folder's name shows."""
_WHERE_UNNAMED = {"rollout.sampling.min_p": 0.0}
"""What a recording was made with if it does not name the setting."""


class RecordingInfo(BaseModel):
    """What all groups of a recording have in common."""

    # A column's `missing` may be NaN or infinite, which JSON has no numbers for.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    format: Literal[1] = 1
    settings: dict[str, Any]
    """Settings that a replay must share, by their dotted keys."""
    tokenizer: str
    """Digest of the vocabulary."""
    columns: tuple[ExtraColumn, ...] = ()
    """The environment's own columns."""

    @field_validator("settings")
    @classmethod
    def _named(cls, value: dict[str, Any]) -> dict[str, Any]:
        return _WHERE_UNNAMED | value


class RecordedGroup(BaseModel):
    """One group, without its rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    epoch: NonNegativeInt
    prompt_id: str
    prompt: str
    """The prompt's text, for people who read samples."""
    position: NonNegativeInt
    """Place in the stream of the run that recorded it: groups are replayed in this order."""
    start_version: NonNegativeInt
    end_version: NonNegativeInt
    largest_token: NonNegativeInt
    """The largest token id in its rows, to check against a vocabulary."""
    sequence_lengths: list[NonNegativeInt] = Field(min_length=1)
    tags: list[dict[str, Any]]
    """As in `KVBatchMeta`, one entry per sample."""

    @property
    def key(self) -> tuple[int, str]:
        """Epoch and prompt id: what the group is found by."""
        return self.epoch, self.prompt_id

    @property
    def folder_name(self) -> str:
        """A name that any file system accepts; the digest distinguishes ids that look the same in it."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", self.prompt_id)[:_READABLE]
        digest = hashlib.blake2b(self.prompt_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return f"{self.epoch}-{readable}-{digest}"


class RecordingFolder:
    """The `rollouts/` folder of a run that records. A group's folder appears whole, and is replaced whole.

    Nothing is written once the folder under this path is a different one, for example because another run took its
    place. With `opened=False`, settings that do not match the folder are refused at once, but nothing is changed before
    the first group is written: a run that is refused for another reason leaves it alone.
    """

    def __init__(self, folder: Path, info: RecordingInfo, *, opened: bool = True) -> None:
        self._folder = folder
        self._info = info
        self._opening = threading.Lock()
        self._run_dir = folder.parent.stat() if folder.parent.exists() else None
        self._place: os.stat_result | None = None
        if (folder / _INFO).exists():
            _refuse_other_settings(_read_info(folder / _INFO), info, folder)
        if opened:
            self._require_place()

    def _require_place(self) -> None:
        """Make the folder, the first time; afterwards, make sure that it is still the same."""
        with self._opening, writing(self._folder):
            path, known = (self._folder, self._place) if self._place else (self._folder.parent, self._run_dir)
            if known is not None and not os.path.samestat(path.stat(), known):
                raise RecordError(f"{str(path)!r} was replaced during the run: nothing is written to it")
            if self._place is None:
                self._make()
                self._place = self._folder.stat()

    def _make(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for draft in self._folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(draft)
        if not (self._folder / _INFO).exists():
            draft_file = self._folder / f".{_INFO}.writing"
            draft_file.write_text(self._info.model_dump_json(indent=1) + "\n", encoding="utf-8")
            draft_file.replace(self._folder / _INFO)

    def write(self, group: RecordedGroup, rows: SampleBatch) -> None:
        """Put a group on disk, replacing an older record of it; `RecordError` if the disk refuses."""
        from penstock.data_plane.archive import (
            save_rows,  # imports torch, which callers that only look at folders do not need
        )

        name = group.folder_name
        final, draft, replaced = (self._folder / f"{prefix}{name}" for prefix in ("", _DRAFT, _REPLACED))
        self._require_place()
        with writing(final):
            try:
                draft.mkdir()
                save_rows(draft, rows)
                (draft / _GROUP).write_text(json.dumps(group.model_dump()) + "\n", encoding="utf-8")
                if final.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
                    final.rename(replaced)
                draft.rename(final)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        shutil.rmtree(replaced, ignore_errors=True)


@dataclass(frozen=True)
class Recording:
    """The complete groups of a recording, in the order in which they were dispatched."""

    run_dir: Path
    info: RecordingInfo
    groups: tuple[RecordedGroup, ...]
    _found: Mapping[tuple[int, str], tuple[RecordedGroup, Path]] = field(repr=False)

    @classmethod
    def read(cls, run_dir: str | Path) -> Recording:
        """Look through a recording; the rows themselves are read later, group by group."""
        info = read_info(run_dir)
        found = {group.key: (group, folder) for group, folder in _groups(Path(run_dir) / FOLDER)}
        if not found:
            raise SetupError(f"rollout.replay_from: {str(run_dir)!r} has no complete group of rollouts")
        groups = sorted((group for group, _ in found.values()), key=lambda group: (group.position, group.key))
        return cls(Path(run_dir), info, tuple(groups), found)

    def find(self, epoch: int, prompt_id: str) -> tuple[RecordedGroup, Path] | None:
        """A group and the folder of its rows."""
        return self._found.get((epoch, prompt_id))


def read_info(run_dir: str | Path) -> RecordingInfo:
    """What a recording's groups have in common; an error says what the folder is instead."""
    path = Path(run_dir) / FOLDER / _INFO
    if not os.path.isdir(run_dir):
        raise SetupError(f"rollout.replay_from: there is no folder {str(run_dir)!r}")
    if not os.path.exists(path):
        raise SetupError(
            f"rollout.replay_from: {str(run_dir)!r} holds no recorded rollouts; record some with "
            "`penstock train CONFIG --rollouts-only`, or with rollout.record = true"
        )
    return _read_info(path)


def _read_info(path: Path) -> RecordingInfo:
    try:
        return RecordingInfo.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, ConfigError) as error:
        raise SetupError(f"{str(path)!r} cannot be used: {_reason(error)}") from error


def _groups(folder: Path) -> Iterator[tuple[RecordedGroup, Path]]:
    """Complete groups; if only the older of two records of a group remains, that one."""
    for path in sorted(folder.iterdir()):
        newer = folder / path.name.removeprefix(_REPLACED)
        if not path.is_dir() or path.name.startswith(_DRAFT) or (newer != path and newer.exists()):
            continue
        yield _read_group(path), path


def _read_group(folder: Path) -> RecordedGroup:
    try:
        return RecordedGroup.model_validate(safe_value(json.loads((folder / _GROUP).read_text(encoding="utf-8"))))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"rollout.replay_from: the recorded group in {str(folder)!r} cannot be read: {_reason(error)}. Remove the "
            "folder to continue without it"
        ) from error


def _refuse_other_settings(before: RecordingInfo, info: RecordingInfo, folder: Path) -> None:
    if before != info:
        other = [key for key, value in info.settings.items() if before.settings.get(key) != value]
        other += ["the environment's extra_columns"] if before.columns != info.columns else []
        other = other or ["the tokenizer"]
        raise SetupError(
            f"rollout.record: {str(folder)!r} has rollouts that were recorded with different settings "
            f"({', '.join(other)}); use the same, or another run_dir"
        )


def _reason(error: Exception) -> str:
    """The first line of an error, which pydantic follows with many."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)

"""The controller in a checkpoint: everything it needs to continue as if nothing had happened.

Layout of the folder:

    state.json             `ControllerState`
    ledger.safetensors     one byte per prompt handed out: open, trained, filtered or dropped
    rows/                  the ready groups' rows, where there are any
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from penstock.data_plane.row_keeper import HeldRows
from penstock.errors import SetupError

_STATE, _LEDGER, _ROWS = "state.json", "ledger.safetensors", "rows"


class ControllerState(BaseModel):
    """The numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    stream: str
    """`PromptStream.digest`."""
    redispatches: dict[int, NonNegativeInt]
    """How often open visits were dispatched again, by position."""
    ready: dict[str, NonNegativeInt]
    """Ready groups, and the positions of their visits."""
    groups: NonNegativeInt
    committed: NonNegativeInt
    dropped: NonNegativeInt
    bound_drops: list[NonNegativeInt]
    free_drops: NonNegativeInt
    events: dict[str, NonNegativeInt]
    """Events so far, by name."""
    tokens_generated: NonNegativeInt
    elapsed_seconds: NonNegativeFloat
    buffer: dict[str, Any]
    extra_columns: dict[str, str] = {}
    """`Parts.extra_columns`; empty in a checkpoint that does not say."""


@dataclass(frozen=True)
class ControllerSnapshot:
    """The controller between two steps, in memory."""

    state: ControllerState
    ends: bytes
    """The ledger."""
    rows: HeldRows | None
    """Those of the ready groups, which their keeper holds until `release`."""

    def write(self, folder: Path) -> None:
        """Write everything into an existing folder; the rows are written by their keeper."""
        (folder / _STATE).write_text(self.state.model_dump_json(indent=1) + "\n", encoding="utf-8")
        ends = torch.frombuffer(bytearray(self.ends), dtype=torch.uint8) if self.ends else torch.empty(0).byte()
        save_file({"ends": ends}, folder / _LEDGER)
        if self.rows is not None:
            (folder / _ROWS).mkdir()
            self.rows.save(folder / _ROWS)

    def release(self) -> None:
        """It has been written, or will not be."""
        if self.rows is not None:
            self.rows.release()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release it if what is done inside does not succeed, so that nobody will write it."""
        try:
            yield
        except BaseException:
            self.release()
            raise


@dataclass(frozen=True)
class SavedController:
    """The controller in a checkpoint."""

    state: ControllerState
    ends: bytes
    """The ledger."""
    rows: Path | None
    """The folder of the ready groups' rows; whoever restores them reads it."""

    @classmethod
    def read(cls, folder: Path) -> SavedController:
        """What `ControllerSnapshot.write` wrote; `SetupError` names the file that cannot be used."""
        try:
            state = ControllerState.model_validate_json((folder / _STATE).read_bytes())
            ends = load_file(folder / _LEDGER)["ends"].numpy().tobytes()
        except (OSError, KeyError, SafetensorError, ValidationError) as error:
            raise SetupError(f"checkpoint {str(folder.parent)!r} cannot be read: {error}") from error
        return cls(state, ends, folder / _ROWS if state.ready else None)

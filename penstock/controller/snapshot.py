"""The controller in a checkpoint: everything it must know to go on as if nothing had happened.

Layout of the folder:

    state.json             `ControllerState`
    ledger.safetensors     one byte per prompt handed out: open, trained, filtered or dropped
    rows/                  the ready groups' rows, where there are any
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from penstock.data_plane.archive import load_rows, save_rows
from penstock.data_plane.client import SampleBatch
from penstock.errors import SetupError

_STATE, _LEDGER, _ROWS = "state.json", "ledger.safetensors", "rows"


class ControllerState(BaseModel):
    """The numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    stream: str
    """`PromptStream.digest`."""
    redispatches: dict[int, NonNegativeInt]
    """How often open visits went round again, by position."""
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


@dataclass(frozen=True)
class ControllerSnapshot:
    """The controller between two steps."""

    state: ControllerState
    ends: bytes
    """The ledger."""
    rows: SampleBatch | None
    """Those of the ready groups."""

    def write(self, folder: Path) -> None:
        """Write everything into an existing folder."""
        (folder / _STATE).write_text(self.state.model_dump_json(indent=1) + "\n", encoding="utf-8")
        ends = torch.frombuffer(bytearray(self.ends), dtype=torch.uint8) if self.ends else torch.empty(0).byte()
        save_file({"ends": ends}, folder / _LEDGER)
        if self.rows is not None:
            (folder / _ROWS).mkdir()
            save_rows(folder / _ROWS, self.rows)

    @classmethod
    def read(cls, folder: Path) -> ControllerSnapshot:
        """What `write` wrote; `SetupError` names the file that cannot be used."""
        try:
            state = ControllerState.model_validate_json((folder / _STATE).read_bytes())
            ends = load_file(folder / _LEDGER)["ends"].numpy().tobytes()
        except (OSError, KeyError, SafetensorError, ValidationError) as error:
            raise SetupError(f"checkpoint {str(folder.parent)!r} cannot be read: {error}") from error
        return cls(state, ends, load_rows(folder / _ROWS) if state.ready else None)

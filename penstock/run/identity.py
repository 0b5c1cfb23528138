"""`run.json`: which run a folder belongs to, and whether it ever had a checkpoint."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SetupError

FILE_NAME = "run.json"
_PUT_BACK = "Put the run's own file back"
_WAY_OUT = f"{_PUT_BACK}, or start over, with the rest moved aside: --from-scratch"


@dataclass(frozen=True)
class RunIdentity:
    """The run's name for itself, from its first process to its last.

    `first_checkpoint` is written before the checkpoint of that name appears. So a run that has one on record either
    had a checkpoint, or was killed while its draft was still there under the draft's own name.
    """

    run_id: str
    first_checkpoint: str | None = None
    """Name of the folder, such as `step_50`."""

    @classmethod
    def new(cls) -> RunIdentity:
        """The identity of a new run."""
        return cls(secrets.token_hex(8))

    @classmethod
    def read(cls, folder: Path) -> RunIdentity:
        """The identity of the run in a folder; `SetupError` if it cannot be read."""
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            run_id, first = content["run_id"], content.get("first_checkpoint")
        except FileNotFoundError as error:  # nothing says that this is still a run's folder, to be moved aside
            raise SetupError(f"{str(path)!r}, which names the run, is gone. {_PUT_BACK}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(f"{str(path)!r}, which names the run, cannot be read: {error}. {_WAY_OUT}") from error
        if not isinstance(run_id, str) or not run_id or not (first is None or isinstance(first, str)):
            raise SetupError(f"{str(path)!r} names no run. {_WAY_OUT}")
        return cls(run_id, first)

    def as_text(self) -> str:
        """The content of the file."""
        first = {} if self.first_checkpoint is None else {"first_checkpoint": self.first_checkpoint}
        return json.dumps({"run_id": self.run_id, **first}) + "\n"

"""Checkpoints on disk: written to a temporary folder, then renamed, so that a `step_N` folder is always complete."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, SetupError
from penstock.training.interface import Trainer

_NAME = re.compile(r"step_(\d+)")


class CheckpointStore:
    """The `checkpoints/` folder of a run; keeps the latest few."""

    def __init__(self, folder: Path, keep_latest: int) -> None:
        self._folder = folder
        self._keep_latest = keep_latest

    async def save(self, step: int, trainer: Trainer, tokenizer: Any) -> Path:
        """Write `step_N`: weights, configuration and tokenizer for transformers, and the trainer's own state."""
        final = self._folder / f"step_{step}"
        if final.exists():
            return final
        draft = self._folder / f".writing_step_{step}"
        try:
            await asyncio.to_thread(_make_empty, draft)
            await trainer.save_checkpoint(draft)
            await asyncio.to_thread(self._complete, draft, final, step, tokenizer)
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"step {step} could not be saved to {self._folder}: {error}") from error
            raise
        return final

    def _complete(self, draft: Path, final: Path, step: int, tokenizer: Any) -> None:
        tokenizer.save_pretrained(draft)
        (draft / "penstock.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
        draft.rename(final)
        for stale in checkpoints(self._folder)[: -self._keep_latest]:
            shutil.rmtree(stale)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint; an error names the folder that has none."""
    found = checkpoints(folder)
    if not found:
        raise SetupError(f"there is no checkpoint in {str(folder)!r}")
    return found[-1]

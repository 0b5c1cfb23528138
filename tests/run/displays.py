"""Runs in processes of their own, with displays that break, and what such a run must leave all the same."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config

CTRL_S = b"\x13"


def train_command(config: RunConfig, folder: Path, *flags: str) -> list[str]:
    """The command that trains with the config."""
    file = folder / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    return [sys.executable, "-m", "penstock", "train", str(file), *flags]


def events(config: RunConfig) -> list[dict[str, Any]]:
    """What is in `events.jsonl`."""
    text = (Path(config.run_dir) / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def causes(config: RunConfig) -> list[str]:
    """Why the display was lost, as often as the events say so."""
    return [event["cause"] for event in events(config) if event["event"] == "display_lost"]


def check_ended(config: RunConfig, stopped_by: str = "max_steps") -> None:
    """Raise where the run has not left its checkpoint, summary and report."""
    run_dir = Path(config.run_dir)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == stopped_by
    assert "error" not in summary
    if stopped_by == "max_steps":
        assert summary["steps"] == config.training.max_steps
    assert (run_dir / "checkpoints" / f"step_{summary['steps']}" / "model.safetensors").is_file()
    assert (run_dir / "report.html").read_text(encoding="utf-8").endswith("</html>\n")


@contextmanager
def full_pipe() -> Iterator[int]:
    """A pipe that takes nothing more, and that nobody reads: its writing end."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(write_end, True)
    try:
        yield write_end
    finally:
        os.close(read_end)
        os.close(write_end)


class Terminal:
    """A terminal of its own with a process that has it as its controlling one."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            **{"stdin": theirs, "stdout": theirs, "stderr": theirs, **options},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
            pass_fds=(theirs,),
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        self.shown = b""

    def wait_for(self, text: bytes) -> None:
        """Until the process has shown it."""
        while text not in self.shown:
            self.shown += os.read(self._ours, 65536)

    def type(self, keys: bytes) -> None:
        """As a person at the keyboard."""
        os.write(self._ours, keys)

    def close(self) -> None:
        """Hang up."""
        os.close(self._ours)

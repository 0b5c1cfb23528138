"""Where a process of a run comes from: its command, host, versions and commits; never its environment variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.text import cut, safe

GIT_SECONDS = 5.0
"""How long one question to git may take: a repository may be huge, or on a disk that hangs."""
_MOST_ARGUMENTS, _LONGEST_ARGUMENT = 200, 1_000
_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "tensordict",
    "numpy",
    "pydantic",
    "peft",
    "triton",
    "datasets",
    "reasoning-gym",
    "math-verify",
    "verifiers",
    "tensorboard",
    "wandb",
    "mlflow",
    "prometheus-client",
)
"""What a run may use."""
_SECRET_NAME = re.compile(r"(?:^|[^a-z])(?:token|passw(?:or)?d|secret|(?:api|access)[-_]?key)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"://[^/@\s]+@")
_HIDDEN = "***"


def provenance(seed: int) -> dict[str, Any]:
    """What an event reports about the process that begins now; a part that cannot be determined is None."""
    return {
        "seed": seed,
        "command": command_line(sys.orig_argv),
        "working_directory": _working_directory(),
        "host": _host(),
        "platform": safe(platform.platform()),
        "versions": versions(),
        "git": commit_of(_working_directory()),
        "penstock_git": _own_commit(),
    }


def command_line(arguments: Sequence[str]) -> list[str]:
    """The arguments as they may be written to a file that is shared: safe, not too long, without passwords.

    Example: `["x", "--hf-token", "abc", "api_key=def", "http://me:pw@host/"]` becomes
    `["x", "--hf-token", "***", "api_key=***", "http://***@host/"]`.
    """
    shown = []
    hide_next = False
    for argument in arguments[:_MOST_ARGUMENTS]:
        name, equals, _ = argument.partition("=")
        is_secret = _SECRET_NAME.search(name) is not None
        if hide_next or (is_secret and equals):
            argument = f"{name}={_HIDDEN}" if equals and not hide_next else _HIDDEN
        hide_next = is_secret and not equals and name.startswith("-")
        shown.append(cut(safe(_URL_LOGIN.sub(f"://{_HIDDEN}@", argument)), _LONGEST_ARGUMENT))
    left_out = len(arguments) - len(shown)
    return [*shown, f"… ({left_out:,} more arguments)"] if left_out > 0 else shown


def versions() -> dict[str, str]:
    """Versions of Python, Penstock and those packages a run may use that are installed."""
    found = {"python": platform.python_version(), "penstock": penstock.__version__}
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
            continue
        if isinstance(version, str):  # None if a package's metadata are damaged
            found[package] = safe(version)
    return found


def commit_of(folder: str | None) -> dict[str, Any] | None:
    """`{"commit": ..., "dirty": ...}` of the git repository that contains a folder; None if there is none, or no git.

    `dirty`: whether tracked files differ from the commit; None if that took too long to find out.
    """
    commit = None if folder is None else _git(folder, "rev-parse", "--verify", "HEAD")
    if folder is None or not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": safe(commit), "dirty": None if changed is None else bool(changed)}


def _own_commit() -> dict[str, Any] | None:
    """Of Penstock's own checkout; None if it is installed as a package, even inside somebody else's repository."""
    folder = str(Path(penstock.__file__).parent)
    return commit_of(folder) if _git(folder, "ls-files", "--error-unmatch", "__init__.py") else None


def _git(folder: str, *arguments: str) -> str | None:
    """What git answers; None if it refuses, is not there, or takes too long."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def _working_directory() -> str | None:
    try:
        return safe(os.getcwd())
    except OSError:  # it was deleted
        return None


def _host() -> str | None:
    try:
        return safe(socket.gethostname())
    except OSError:
        return None

"""A `mooncake_master` of our own: found, started, watched and ended; nobody else's is ever touched."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.data_plane.adapters.mooncake.environment import set_environment
from penstock.data_plane.adapters.mooncake.libraries import about_missing, missing_library
from penstock.data_plane.adapters.mooncake.listening import free_port, listening_sockets
from penstock.data_plane.adapters.mooncake.wheel import requirement_here
from penstock.errors import DataPlaneError, SetupError
from penstock.runtime.threads import in_lasting_thread

_LAUNCH = (
    "import os, signal, sys; "
    "signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)); "
    "from penstock.runtime.orphans import end_with_parent; end_with_parent(int(sys.argv[1])); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""The kernel ends the master with its owner, even if that is killed; this outlasts the exec. A signal to all processes
of a job does not reach it: the owner may still need it. Blocked, not ignored, because it sets handlers of its own."""
_START_SECONDS = 30.0
_ATTEMPTS = 3
"""Somebody else may take a free port before the master does."""
_LOOK_SECONDS = 0.02
_END_SECONDS = 10.0
_LOG_TAIL = 600


def find_master() -> Path:
    """The `mooncake_master` of the installed package, else the one on PATH; it can be run.

    Some installers drop the run bit of files in a package's folder: it is restored.
    """
    spec = importlib.util.find_spec("mooncake")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            _make_runnable(path)
            return path
    on_path = shutil.which("mooncake_master")
    if on_path is None:
        raise SetupError(
            f"mooncake_master is neither in the package mooncake nor on PATH; pip install '{requirement_here()}'"
        )
    return Path(on_path)


def _make_runnable(path: Path) -> None:
    if os.access(path, os.X_OK):
        return
    try:
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    except OSError as error:
        raise SetupError(f"{path} may not be run, and that cannot be changed here ({error}); chmod +x it") from error


class MooncakeMaster:
    """A `mooncake_master` process, from the end of `__init__`, when it answers, to `close`, or until it dies.

    Invariants: it ends with the process that started it, however that ends. `on_loss` is called once, from a thread of
    its own, if it ends without `close`; never after `close`. Its log is `log`; a log that nobody named is a temporary
    file, removed on `close` unless the master was lost.

    Worked example: `master = MooncakeMaster()` listens at `master.address`, say "127.0.0.1:40123". Somebody kills it:
    `master.loss` says "mooncake_master was ended by SIGKILL; its log is ...". `close` then has nothing left to end.
    """

    def __init__(
        self, host: str = "127.0.0.1", log: Path | None = None, on_loss: Callable[[str], None] | None = None
    ) -> None:
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._closing = False
        self.loss: str | None = None
        """How it ended, if it did so before `close`."""
        program = find_master()
        self._is_own_log = log is None
        self.log = _new_log() if log is None else log
        """Where it writes what it has to say."""
        try:
            self._process, self.port = self._started(program, host)
        except SetupError:  # it says all that there is to say
            self._drop_own_log()
            raise
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        """Where clients reach it."""
        self._watcher = threading.Thread(target=self._watch, name="penstock-mooncake-master", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """End it; a second call is a no-op. There is nothing to save: rows live in the clients' memory."""
        with self._lock:
            self._closing = True
        self._process.kill()
        self._watcher.join(_END_SECONDS)
        if self.loss is None:
            self._drop_own_log()

    def _drop_own_log(self) -> None:
        if self._is_own_log:
            self.log.unlink(missing_ok=True)

    def _watch(self) -> None:
        status = self._process.wait()
        with self._lock:
            if self._closing:
                return
            self.loss = f"mooncake_master {_ended(status)}; its log is {self.log}"
        if self._on_loss is not None:
            self._on_loss(self.loss)

    def _started(self, program: Path, host: str) -> tuple[subprocess.Popen[bytes], int]:
        problem = ""
        for _ in range(_ATTEMPTS):
            port = free_port(host)
            process = in_lasting_thread(partial(_spawned, _command(program, host, port), host, self.log))
            try:
                if _answers(process, port):
                    return process, port
            except BaseException:
                _kill(process)
                raise
            problem = self._why_not(process)
        raise DataPlaneError(problem)

    def _why_not(self, process: subprocess.Popen[bytes]) -> str:
        """Why it did not start; raises `SetupError` if another attempt cannot help."""
        status = process.poll()
        _kill(process)
        said = self.log.read_text(encoding="utf-8", errors="replace").strip()
        library = missing_library(said)
        if library is not None:
            raise SetupError(f"mooncake_master {about_missing(library)}")
        ended = f"did not answer within {_START_SECONDS:g} s" if status is None else f"{_ended(status)} when it started"
        return f"mooncake_master {ended}; the end of its log, {self.log}: {said[-_LOG_TAIL:] or 'empty'}"


def _command(program: Path, host: str, port: int) -> list[str]:
    return [
        str(program),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={free_port(host)}",
        "--enable_metric_reporting=false",
        # Rows stay until they are cleared: a store that is full refuses rows, and drops none.
        "--eviction_high_watermark_ratio=1.0",
        "--eviction_ratio=0.0",
        "--allow_evict_soft_pinned_objects=false",
    ]


def _spawned(command: list[str], host: str, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    set_environment(host, environment)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _LAUNCH, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it listens at its port; False if it ends before, or never does."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
            return False
        if port in {each for _, each in listening_sockets(process.pid)}:
            return True
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _new_log() -> Path:
    handle, path = tempfile.mkstemp(prefix="penstock-mooncake-master-", suffix=".log")
    os.close(handle)
    return Path(path)

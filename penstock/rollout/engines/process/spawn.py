"""Starting and ending an engine's process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Any

from penstock.config.model import ModelConfig
from penstock.rollout.engines.process.wire import Frame
from penstock.runtime.cpu import let_idle_threads_sleep
from penstock.weights.shared_memory import SharedMemory

_LAUNCH = (
    "import signal; "
    "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]; "
    "from penstock.rollout.engines.process.server import main; main()"
)
"""A batch system that ends a job signals all of its processes; this one ends when its controller has no more use for
it, which may be after a last checkpoint."""
_END_SECONDS = 5.0
"""How long a process may take to end by itself once its connection is closed."""

START_CALL = 0
"""The id of the call that makes the engine; its answer says that it serves."""


class EngineProcess:
    """A process that loads a model and serves it; begun first, so that it loads while this process does too.

    Ctrl-C, SIGTERM and SIGHUP are this process's alone to handle; it does not listen to them. When its connection is
    closed it ends, also where that is because this process was killed.
    """

    def __init__(self, model: ModelConfig, device: str, **engine: Any) -> None:
        self.memory = SharedMemory.create()
        self.connection, theirs = socket.socketpair()
        let_idle_threads_sleep()
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _LAUNCH, str(theirs.fileno()), str(self.memory.fd)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints must not get into what the command prints
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=(theirs.fileno(), self.memory.fd),
                start_new_session=True,
            )
        except OSError:
            self.connection.close()
            self.memory.close()
            raise
        finally:
            theirs.close()
        head = {"id": START_CALL, "call": "start", "model": model.model_dump(), "device": device, "engine": engine}
        with contextlib.suppress(OSError):  # it is gone already: whoever waits for its answer learns so
            self.connection.sendall(Frame(head).encode())

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def end(self, patience_seconds: float = _END_SECONDS) -> int:
        """Close the connection, which ends it, or kill it; gives its exit status. A second call is a no-op."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            status = self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self.connection.close()
        self.memory.close()
        return status

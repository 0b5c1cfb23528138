"""Starting and ending an engine's process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from penstock.config.sections.model import ModelConfig
from penstock.rollout.engines.process.wire import Frame
from penstock.runtime.cpu import let_idle_threads_sleep
from penstock.runtime.threads import in_lasting_thread

_LAUNCH = (
    "import signal; "
    "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]; "
    "import sys; from penstock.runtime.orphans import end_with_parent; end_with_parent(int(sys.argv[2])); "
    "from penstock.rollout.engines.process.server import main; main()"
)
"""A batch system that ends a job signals all of its processes; this one ends when its controller no longer needs it,
which may be after a last checkpoint. Its very first action ties it to its controller, so it cannot stay behind while it
is stopped or still importing."""
_END_SECONDS = 5.0
"""How long a process may take to end by itself once its connection is closed."""

START_CALL = 0
"""The id of the call that makes the engine; its answer says that it serves."""


class EngineProcess:
    """A process that loads a model and serves it; started first, so that both processes load at the same time.

    Ctrl-C, SIGTERM and SIGHUP are handled by this process alone; the engine's process ignores them. It ends when its
    connection is closed, even if that is because this process was killed; if it can no longer act, the kernel ends it.
    """

    def __init__(self, model: ModelConfig, device: str, **engine: Any) -> None:
        self.name: str = engine.get("name", "embedded")
        """The engine's."""
        self.connection, theirs = socket.socketpair()
        let_idle_threads_sleep()
        try:
            # The kernel ends it with the thread that started it, and this one may be done when the model is loaded.
            self._process = in_lasting_thread(lambda: _started(theirs.fileno()))
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()
        head = {"id": START_CALL, "call": "start", "model": model.model_dump(), "device": device, "engine": engine}
        with contextlib.suppress(OSError):  # it is already gone: the caller waiting for its answer finds out
            self.connection.sendall(Frame(head).encode())

    @property
    def pid(self) -> int:
        """Its id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, even if it is stopped; the reader of its connection sees the end."""
        self._process.kill()

    def end(self, patience_seconds: float = _END_SECONDS) -> int:
        """Close the connection, which ends it, or kill it; returns its exit status. A second call is a no-op."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            status = self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._killed_status()
        self.connection.close()
        return status

    def _killed_status(self) -> int:
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # inside the kernel, as with a file system that is gone: it ends when it can
            return -signal.SIGKILL


def _started(connection: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _LAUNCH, str(connection), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # a library's prints must not get into the command's output
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=(connection,),
        start_new_session=True,
    )

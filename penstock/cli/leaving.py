"""The end of the process: orderly where that is possible, in any case soon, and with the command's exit code."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from typing import NoReturn

from penstock.cli.streams import Streams
from penstock.observe.sinks import point_away

ORDERLY_SECONDS = 10.0
"""How long threads, pools and exit handlers that are left over may take."""
_FAILED = 1


class Ending:
    """Ends the process within `ORDERLY_SECONDS` of `leave`; made before anything else registers what to do at exit.

    `leave` lets Python end as it does: threads that are no daemons are waited for, then exit handlers are called, the
    newest first. The last one is this object's, and leaves there: what Python and native libraries do after it may hang
    as well, and nothing depends on it. A thread ends the process at the time limit where it has not come so far.

    Example: a reward's thread pool has a call that never returns. `leave(0)` begins Python's end, which waits for the
    pool; after `ORDERLY_SECONDS` the process ends with code 0.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._code: int | None = None
        atexit.register(self._last)

    def leave(self, code: int) -> NoReturn:
        """End the process with this code; what was printed gets to where it goes, if anybody takes it."""
        self._code = self._written(code)
        threading.Thread(target=self._at_the_limit, name="exit", daemon=True).start()
        sys.exit(self._code)

    def _last(self) -> None:
        if self._code is not None:
            logging.shutdown()
            os._exit(self._written(self._code))

    def _at_the_limit(self) -> None:
        time.sleep(ORDERLY_SECONDS)
        try:
            _kill_pools()
        finally:
            os._exit(_FAILED if self._code is None else self._code)

    def _written(self, code: int) -> int:
        """The code, once all that was printed is written; a failure where stdout did not take it."""
        try:
            self._streams.drain()
        except (OSError, ValueError) as error:
            point_away(1)
            reason = getattr(error, "strerror", None) or error
            sys.stderr.write(f"error: stdout could not be written: {reason}\n")
            return code or _FAILED
        return code


def exit_status(code: object) -> int:
    """The exit code that Python has for what `SystemExit` was raised with; a text is shown."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return _FAILED


def _kill_pools() -> None:
    """Processes of `multiprocessing` would wait for a parent that is gone, for ever."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for process in multiprocessing.active_children():
            process.kill()

"""Settings of the whole test suite."""

from __future__ import annotations

import signal
import threading

from penstock.runtime.cpu import let_idle_threads_sleep

let_idle_threads_sleep()

# A shell starts background jobs with SIGINT ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

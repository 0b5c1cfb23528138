"""Settings of the whole test suite."""

from __future__ import annotations

from penstock.runtime.cpu import let_idle_threads_sleep

let_idle_threads_sleep()

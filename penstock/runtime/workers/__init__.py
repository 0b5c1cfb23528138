"""Where a worker lives: `start(spec, placement)` builds it there and hands out a handle for its calls.

A worker is any object whose methods take and return what can cross between processes. It is built where it lives, from
plain data. Calls of its ordinary methods run one at a time, in order, on a thread of its own; calls of its async
methods run at the same time. Two methods mean something here, if it has them: `state()`, cheap and callable from any
thread, says what a handle knows without asking; `close()` is called at the end.

Nothing here knows what workers do.
"""

from penstock.runtime.workers.handle import WorkerHandle
from penstock.runtime.workers.spec import Placement, WorkerKind, WorkerSpec
from penstock.runtime.workers.start import start

__all__ = ["Placement", "WorkerHandle", "WorkerKind", "WorkerSpec", "start"]

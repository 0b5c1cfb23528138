"""Which call of a run fails, and how: drawn from a seed, counted in a file that outlives the process."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.rollout.prompts import derive_seed


class Site(Enum):
    """Where a fault can strike. A site counts its calls, and all of its kinds are drawn at each."""

    ENGINE = "generation requests"
    REWARD = "rewards"
    MICROBATCH = "forward and backward passes"
    FINISH = "ends of steps"
    PUT = "writes to the data plane"


class Kind(Enum):
    """What goes wrong."""

    ENGINE_RAISES = "engine_raises"
    ENGINE_HANGS = "engine_hangs"
    ENGINE_SLOW = "engine_slow"
    ENVIRONMENT_RAISES = "environment_raises"
    ENVIRONMENT_HANGS = "environment_hangs"
    ENVIRONMENT_NAN = "environment_nan"
    REWARD_HOLDS_LOCK = "reward_holds_lock"
    REWARD_EXITS = "reward_exits"
    TRAINER_MICROBATCH = "trainer_microbatch"
    TRAINER_FINISH = "trainer_finish"
    DATA_PLANE_PUT = "data_plane_put"
    ENGINE_STOPPED = "engine_stopped"
    DISPLAY_LOST = "display_lost"
    CHECKPOINT_FLIPPED = "checkpoint_flipped"


KINDS_AT = {
    Site.ENGINE: (Kind.ENGINE_RAISES, Kind.ENGINE_HANGS, Kind.ENGINE_SLOW),
    Site.REWARD: (
        Kind.ENVIRONMENT_RAISES,
        Kind.ENVIRONMENT_HANGS,
        Kind.ENVIRONMENT_NAN,
        Kind.REWARD_HOLDS_LOCK,
        Kind.REWARD_EXITS,
    ),
    Site.MICROBATCH: (Kind.TRAINER_MICROBATCH,),
    Site.FINISH: (Kind.TRAINER_FINISH,),
    Site.PUT: (Kind.DATA_PLANE_PUT,),
}
"""Faults inside a process; the other kinds strike it from outside (`chaos_blows`)."""
_FIRST_WITHIN = {Site.ENGINE: 40, Site.REWARD: 40, Site.MICROBATCH: 6, Site.FINISH: 3, Site.PUT: 12}
"""Among so many calls of a process, one fails with each kind, however low the rate."""

AT_MOST = 4
"""Faults that one prompt (of one class, machinery or data) or one step may have in a process. With more attempts than
that in the configuration no prompt is dropped and no step fails for good, however the dice fall."""
ATTEMPTS = 2 * AT_MOST
"""Attempts that the configuration gives; what is above `AT_MOST` is for real timeouts on a busy machine."""


@dataclass(frozen=True)
class FaultPlan:
    """A pure function of seed, process, kind and call number."""

    seed: int
    process: int
    rate: float
    """The share of a site's calls that each of its kinds strikes; 0 is a run without faults."""

    def strikes(self, site: Site, kind: Kind, call: int) -> bool:
        """Whether this call, counted from 0 in its process, has this fault."""
        if self.rate <= 0:
            return False
        first = derive_seed(self.seed, self.process, kind.value, "first") % _FIRST_WITHIN[site]
        drawn: float = derive_seed(self.seed, self.process, kind.value, call) / 2**63
        return call == first or drawn < self.rate


@dataclass(frozen=True)
class Fault:
    """A fault that strikes now."""

    kind: Kind
    call: int


class Notes:
    """Lines in a file, each whole and on its way to the disk when the call returns: a killed process has told all."""

    def __init__(self, path: Path, process: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._process = process

    def write(self, note: str, **facts: Any) -> None:
        """One line. The clock is the machine's, the same in all processes."""
        line = {"note": note, "process": self._process, "t": time.monotonic(), **facts}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class Injector:
    """Counts the calls of each site and says which of them fail. May be called from any thread.

    Nothing strikes before `arm`: a fault while a run is set up or restored ends it with an error by design.
    """

    def __init__(self, plan: FaultPlan, notes: Notes) -> None:
        self._plan = plan
        self._notes = notes
        self._lock = threading.Lock()
        self._calls: Counter[Site] = Counter()
        self._struck: Counter[Hashable] = Counter()
        self._armed = False

    def arm(self) -> None:
        """From here on calls may fail."""
        self._armed = True

    def draw(self, site: Site, victim: Hashable) -> Fault | None:
        """The fault of this call, noted, or None. `victim` is whoever's attempts it costs."""
        with self._lock:
            if not self._armed:
                return None
            call = self._calls[site]
            self._calls[site] += 1
            kind = next((kind for kind in KINDS_AT[site] if self._plan.strikes(site, kind, call)), None)
            if kind is None or self._struck[victim] >= AT_MOST:
                return None
            self._struck[victim] += 1
            self._notes.write("fault", kind=kind.value, call=call)
            return Fault(kind, call)

    def forgive(self, victim: Hashable) -> None:
        """The victim has come through: it may be struck again as often."""
        with self._lock:
            del self._struck[victim]

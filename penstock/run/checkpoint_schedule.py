"""When a checkpoint is due: after a number of steps, or of minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.config.models import CheckpointConfig

Clock = Callable[[], float]
_MINUTE = 60.0


class CheckpointSchedule:
    """Asked after every step whether to save; `every_steps` and `every_minutes` each suffice.

    Invariants:
    - minutes count from the last time one was due, for either reason, and from the beginning before that;
    - while a checkpoint is being written, none is due by time, and the minutes start over: a disk that takes longer
      than `every_minutes` for one does not write all the time.

    Example with `every_steps = 4` and `every_minutes = 10`, steps of 4 minutes, writes that take no time: step 3, after
    12 minutes, is due by time; step 4, after 16, by steps; step 7, 12 minutes after that, by time.
    """

    def __init__(self, config: CheckpointConfig, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._since = clock()

    def due(self, step: int, *, writing: bool) -> bool:
        """Whether to save now that this step has ended; `writing` says that another is still being written."""
        now = self._clock()
        every, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = every is not None and step % every == 0
        by_time = minutes is not None and not writing and now - self._since >= minutes * _MINUTE
        if by_steps or by_time or writing:
            self._since = now
        return by_steps or by_time

"""How long the run waits for its parts: threads and processes that may never answer."""

from __future__ import annotations

from pydantic import PositiveFloat

from penstock.config.sections.base import Section


class TimeoutsConfig(Section):
    """How long the run waits for its parts to respond before it treats them as stuck."""

    start_seconds: PositiveFloat = 1800.0
    """If the model, or the process of engine or trainer, is not ready after this long, the run does not start. The
    process that reads and writes rows for the controller is killed instead, and another takes its place."""
    silence_seconds: PositiveFloat = 60.0
    """A process of engine or trainer, or the one that reads and writes rows for the controller, that sends no heartbeat
    for this long, for example because it is stopped, is killed and counts as dead."""
    weights_seconds: PositiveFloat = 300.0
    """Time limit for an engine to pause for new weights, then to load them, then to resume. An engine that exceeds it
    has failed and is not used until it has loaded a later version."""
    trainer_seconds: PositiveFloat = 3600.0
    """A trainer call that takes longer is stuck: the call is not repeated, and the run ends. With `trainer_process`,
    the trainer counts as lost, so `runtime.restarts` applies."""
    checkpoint_seconds: PositiveFloat = 3600.0
    """Time limit for copying a checkpoint, and again for writing it."""
    stop_seconds: PositiveFloat = 60.0
    """How long a run that is stopping or has failed waits for work in progress before it abandons it."""

"""How long the run waits for its parts: threads and processes that may never answer."""

from __future__ import annotations

from pydantic import PositiveFloat

from penstock.config.base import Section


class TimeoutsConfig(Section):
    """How long the run waits for its parts to answer before it counts them as stuck."""

    start_seconds: PositiveFloat = 1800.0
    """If the model, or the engine's process, is not ready by then, the run does not start."""
    silence_seconds: PositiveFloat = 60.0
    """An engine's process without a heartbeat for this long, such as a stopped one, is killed and counts as dead."""
    weights_seconds: PositiveFloat = 300.0
    """An engine has this long to pause for new weights, as long to take them, and as long to resume; else it has
    failed, and is not used until it has taken a later version."""
    trainer_seconds: PositiveFloat = 3600.0
    """A call of the trainer that takes longer ends the run: its thread cannot be ended, so nothing is repeated."""
    checkpoint_seconds: PositiveFloat = 3600.0
    """A checkpoint has this long to be copied, and as long again to be written."""
    stop_seconds: PositiveFloat = 60.0
    """A run that was told to end, or has failed, waits this long for work in progress, and then abandons it."""

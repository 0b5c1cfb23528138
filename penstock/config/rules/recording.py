"""Rules of recorded rollouts: runs that train nothing, and runs that generate nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config.models import RunConfig


def recording_rules(config: RunConfig) -> Iterator[str]:
    """A run needs a trainer or a recording to write, and an engine for whatever is generated."""
    if config.training.backend == "none" and not config.rollout.record:
        yield (
            "training.backend: none trains nothing, and without rollout.record the run would leave no result; set "
            "rollout.record to true, or backend to local"
        )
    if config.rollout.replay_from is not None:
        yield from _replay_rules(config, config.rollout.replay_from)


def _replay_rules(config: RunConfig, replay_from: str) -> Iterator[str]:
    if Path(replay_from).absolute() == Path(config.run_dir).absolute():
        yield f"rollout.replay_from: {replay_from!r} is run_dir itself; give the replay a run_dir of its own"
    if config.rollout.record:
        yield "rollout.record: the rollouts of rollout.replay_from are recorded already; remove one of the two"
    evaluation = config.eval
    wanted = {"at_start": evaluation.at_start, "at_end": evaluation.at_end, "every_steps": evaluation.every_steps}
    off = {"at_start": "set it to false", "at_end": "set it to false", "every_steps": "remove it"}
    for name in (name for name, value in wanted.items() if value):
        yield f"eval.{name}: rollout.replay_from runs without an engine, so nothing can be evaluated; {off[name]}"

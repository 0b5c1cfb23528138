"""How much a run that goes back by itself may still do: restarts and minutes that are left."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from penstock.controller.failures.losses import loss_in
from penstock.errors import DataPlaneLost, EngineError, TrainerLost, WeightSyncError, WorkerLost
from penstock.run.cautions import nothing_to_lose
from penstock.run.directory import RunDirectory
from penstock.run.restarts import Restarts
from penstock.run.run_log import RunLog
from tests.run.conftest import ConfigMaker
from tests.support.lost_parts import lost


def chain(*errors: BaseException) -> BaseException:
    """The first error, caused by the second, and so on."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (chain(WeightSyncError("a"), EngineError("b"), TrainerLost("c")), "trainer"),
        (ExceptionGroup("several", [ValueError("a"), chain(RuntimeError("b"), DataPlaneLost("c"))]), "data plane"),
        (chain(EngineError("a"), WorkerLost("an engine's process was killed")), None),
        (RuntimeError("TrainerLost: only a message"), None),
    ],
)
def test_the_type_in_the_chain_of_causes_says_what_is_lost(error: BaseException, part: str | None) -> None:
    loss = loss_in(error)
    assert (None if loss is None else loss.part) == part


def test_the_minutes_of_a_run_go_on_through_its_restarts(make_config: ConfigMaker, tmp_path: Path) -> None:
    now = 100.0
    config = make_config(**{"runtime.restarts": 2, "training.max_minutes": 10})
    directory = RunDirectory(tmp_path / "run")
    log = RunLog(config, directory, [])
    restarts = Restarts(config, directory, log, lambda: False, clock=lambda: now)
    now = 200.0
    assert restarts.with_time_left().training.max_minutes == 10, "nothing has been trained yet"
    restarts.training_begins()
    now += 4 * 60
    assert restarts.with_time_left().training.max_minutes == 6
    restarts.training_begins()
    assert restarts.with_time_left().training.max_minutes == 6
    assert config.training.max_minutes == 10, "the run's own settings stay"
    now += 6 * 60
    log.open()
    with pytest.raises(TrainerLost, match=rf"SIGKILL\. Resume with: penstock resume {directory.path}$"):
        asyncio.run(restarts.point_after(lost()))
    assert log.events.count("run_not_restarted") == 1
    directory.close()


def test_restarts_without_anything_to_lose_are_a_warning(make_config: ConfigMaker) -> None:
    apart = {"runtime.trainer_process": True, "data_plane.adapter": "shm"}
    assert not list(nothing_to_lose(make_config(**{"runtime.restarts": 1}, **apart)))
    assert not list(nothing_to_lose(make_config()))
    (warning,) = nothing_to_lose(make_config(**{"runtime.restarts": 1}))
    assert warning.startswith("runtime.restarts: never happens")

"""Whole runs whose engine has a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.config.sections.algorithm import AlgorithmConfig
from penstock.errors import ConfigError, SetupError
from penstock.run import build, build_engines, build_trainer
from penstock.run.starting import parts_of
from penstock.training.workers.none import NoTrainer
from tests.run.conftest import ConfigMaker
from tests.run.test_train import steps
from tests.support.processes import alive, wait_until_gone

pytestmark = pytest.mark.usefixtures("hangups_are_heard")


@pytest.mark.long
def test_a_deterministic_run_has_the_same_losses_to_the_bit(make_config: ConfigMaker, tmp_path: Path) -> None:
    def losses(name: str, process: bool) -> list[tuple[float, ...]]:
        config = make_config(
            **{
                "run_dir": str(tmp_path / name),
                "runtime.engine_process": process,
                "deterministic": True,
                "staleness": {"policy": "in_order", "lookahead": 0},
                "weight_sync.mode": "drain",
                "training.min_groups_per_chunk": 2,
                "training.max_steps": 4,
            }
        )
        keys = ("train/loss", "train/grad_norm", "train/reward_mean", "train/mismatch_logprob_max_abs")
        return [tuple(line[key] for key in keys) for line in steps(penstock.train(config).run_dir)]

    apart = losses("apart", process=True)
    assert len(apart) == 4
    assert any(norm > 0 for _, norm, _, _ in apart)
    assert apart == losses("together", process=False)


def test_it_is_refused_where_there_is_no_engine(make_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.engine_process: has no effect without an engine"):
        make_config(**{"rollout.replay_from": "recorded", "runtime.engine_process": True})


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_still_leaves_a_checkpoint(
    make_config: ConfigMaker, tmp_path: Path, number: signal.Signals
) -> None:
    config = make_config(**{"runtime.engine_process": True, "training.max_steps": 1000, "data.train_size": 4000})
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    command = [sys.executable, "-m", "penstock", "train", path]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    metrics = Path(config.run_dir) / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("train/loss") >= 3):
        assert run.poll() is None
        time.sleep(0.02)
    children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
    for pid in (*map(int, children), run.pid):
        os.kill(pid, number)
    run.wait(60)
    assert json.loads((metrics.parent / "summary.json").read_text(encoding="utf-8"))["stopped_by"] == "interrupted"
    assert len(list((metrics.parent / "checkpoints").iterdir())) == 1
    for pid in children:
        wait_until_gone(int(pid))


def engine_processes() -> bytes:
    """The ids of this process's own."""
    return subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "workers.server"], capture_output=True).stdout


@pytest.mark.long
def test_an_interrupt_while_it_is_built_leaves_no_process(make_config: ConfigMaker) -> None:
    async def begin(config: RunConfig) -> None:
        async with parts_of(config):
            pass

    async def interrupted() -> list[str]:
        config = make_config(**{"runtime.engine_process": True})
        building = asyncio.ensure_future(begin(config))
        while not engine_processes():  # noqa: ASYNC110 - another process, which takes seconds to be ready
            await asyncio.sleep(0.01)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("engine-")]

    before = [thread.name for thread in threading.enumerate() if thread.name.startswith("engine-")]
    assert asyncio.run(interrupted()) == before
    assert not engine_processes()


@pytest.mark.parametrize(("part", "what"), [("serving", "the engine"), ("trainer", "the trainer")])
async def test_a_model_that_never_loads_holds_up_neither_the_start_nor_an_interrupt(
    part: str, what: str, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = threading.Event()
    begun: list[str] = []
    closed: list[str] = []

    class Late:
        async def close(self) -> None:
            closed.append(threading.current_thread().name)

    def stuck(*_: Any, **__: Any) -> Late:
        begun.append(part)
        loads.wait()
        return Late()

    async def begin(config: RunConfig) -> None:
        async with parts_of(config):
            pytest.fail("it never loads")

    monkeypatch.setattr(build if part == "serving" else build_trainer, f"build_{part}", stuck)
    if part == "serving":
        monkeypatch.setattr(build_trainer, "build_trainer", lambda _, plane: NoTrainer(plane, AlgorithmConfig()))
    config = make_config(**{"runtime.timeouts": {"start_seconds": 0.2, "stop_seconds": 0.2}})
    async with asyncio.timeout(60):
        with pytest.raises(SetupError, match=rf"{what} was not ready after 0\.2 s.*runtime\.timeouts\.start_seconds"):
            await begin(config)
        building = asyncio.ensure_future(begin(make_config(**{"runtime.timeouts": {"stop_seconds": 0.2}})))
        while len(begun) < 2:  # noqa: ASYNC110 - it begins in a thread
            await asyncio.sleep(0.01)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        loads.set()
        while len(closed) < 2:  # noqa: ASYNC110 - it happens in threads that nobody waits for
            await asyncio.sleep(0.01)


@pytest.mark.long
def test_adapters_reach_it_merged(make_config: ConfigMaker) -> None:
    config = make_config(
        **{
            "runtime.engine_process": True,
            "model.lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "training.max_steps": 3,
            "training.optimizer": {"lr": 0.03},
        }
    )
    for line in steps(penstock.train(config).run_dir):
        assert line["train/mismatch_logprob_max_abs"] < 1e-4


@pytest.mark.parametrize("part", ["build_trainer", "read_token_facts"])
async def test_a_run_that_cannot_be_built_leaves_no_process(
    part: str, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Noted(build_engines.EngineProcess):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            begun.append(self.pid)

    def broken(*_: Any, **__: Any) -> None:
        raise SetupError("the model is broken")

    monkeypatch.setattr(build_engines, "EngineProcess", Noted)
    monkeypatch.setattr(build_trainer if part == "build_trainer" else build, part, broken)
    if part == "read_token_facts":
        monkeypatch.setattr(build_trainer, "build_trainer", lambda _, plane: NoTrainer(plane, AlgorithmConfig()))
    with pytest.raises(SetupError, match="the model is broken"):
        async with parts_of(make_config(**{"runtime.engine_process": True})):
            pytest.fail("it cannot be built")
    assert len(begun) == 1
    assert not alive(begun[0])


async def test_an_environment_is_closed_whose_engine_cannot_be_built(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    made = build.make_environment

    def noted(*args: Any, **options: Any) -> Any:
        environment = made(*args, **options)
        monkeypatch.setattr(environment, "close", closing)
        return environment

    async def closing() -> None:
        closed.append("environment")

    def broken(*_: Any, **__: Any) -> None:
        raise SetupError("the model is broken")

    monkeypatch.setattr(build, "make_environment", noted)
    monkeypatch.setattr(build, "build_fleet", broken)
    with pytest.raises(SetupError, match="the model is broken"):
        await asyncio.to_thread(build.build_serving, make_config(), trains_too=False)
    assert closed == ["environment"]

"""Runs inside a running event loop, as in a notebook, on a real process with real signals."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.config.reading.loading import dump_config
from tests.run.conftest import ConfigMaker
from tests.support.program import Program

_NOTEBOOK = """
import asyncio, signal, sys, time
import penstock

class Blocking(penstock.SingleTurnEnvironment):
    name = "blocking"

    def __init__(self, pool, data):
        super().__init__(pool)
        self._data = data

    def prompts(self, split):
        return self._data.train if split.value == "train" else []

    def score(self, prompt, response):
        return float(len(response))

    async def run(self, prompt, handle):
        print("blocks the loop", flush=True)
        time.sleep(1000)

def cell():
    before = signal.getsignal(signal.SIGINT)
    try:
        if how == "blocks":
            result = penstock.train(config, environment=Blocking)
        else:
            result = penstock.train(config, reward=lambda prompt, response, answer: float(len(response)))
        print("stopped by", result.stopped_by, flush=True)
    except KeyboardInterrupt as error:
        print("KeyboardInterrupt:", error, flush=True)
    print("handler is back:", signal.getsignal(signal.SIGINT) is before, flush=True)

async def program():
    cell()

config, caller, how = sys.argv[1:]
if caller == "kernel":  # the main thread, inside a loop, with Python's own handler: Ctrl-C is a KeyboardInterrupt
    asyncio.new_event_loop().run_until_complete(program())
else:  # asyncio.run has a handler of its own
    asyncio.run(program())
"""


_SEEN_SECONDS = 2.0
"""Between two signals, as one that is sent before the process has seen the last is lost; a notebook lives on after the
second, so that a third would end it."""


def signalled(
    config: penstock.RunConfig, args: list[str], at: str, number: signal.Signals, *, times: int = 1
) -> tuple[int, str]:
    """Run the notebook, signal it at the line with the text `at`; its exit code and further output."""
    folder = Path(config.run_dir).parent
    endless = config.model_copy(
        update={
            "training": config.training.model_copy(update={"max_steps": 100_000}),
            "observe": config.observe.model_copy(update={"console": "plain"}),
        }
    )
    (folder / "run.yaml").write_text(dump_config(endless), encoding="utf-8")
    (folder / "notebook.py").write_text(_NOTEBOOK, encoding="utf-8")
    with Program([sys.executable, str(folder / "notebook.py"), str(folder / "run.yaml"), *args]) as notebook:
        notebook.until(at)
        for pause in [0.0] + [_SEEN_SECONDS] * (times - 1):
            time.sleep(pause)
            notebook.send(number)
        return notebook.ended()


@pytest.fixture
def data_config(make_config: ConfigMaker, tmp_path: Path) -> penstock.RunConfig:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(4000)))
    return make_config(
        **{
            "data": {"train_path": str(prompts)},
            "rollout.environment": {"kind": "math"},
            "eval": {"at_start": False, "at_end": False},
        }
    )


async def test_a_run_inside_a_running_loop_trains_on_a_loop_of_its_own(data_config: penstock.RunConfig) -> None:
    result = penstock.train(data_config, ["training.max_steps=2"], reward=lambda response, **rest: len(response))
    assert (result.stopped_by, result.summary["steps"]) == ("max_steps", 2)
    again = penstock.resume(result.run_dir, ["training.max_steps=3"], reward=lambda response, **rest: len(response))
    assert again.summary["steps"] == 3
    assert asyncio.get_running_loop().is_running()


@pytest.mark.parametrize(
    ("caller", "number"),
    [
        ("kernel", signal.SIGINT),
        pytest.param("asyncio.run", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("asyncio.run", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_a_run_of_a_notebook_cleanly_with_its_checkpoint(
    data_config: penstock.RunConfig, caller: str, number: signal.Signals
) -> None:
    code, rest = signalled(data_config, [caller, "trains"], "step 2/", number)
    assert "stopping and saving a checkpoint" in rest
    assert "stopped by interrupted" in rest
    assert "handler is back: True" in rest
    assert code == 0, rest
    summary = json.loads((Path(data_config.run_dir) / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "interrupted"
    checkpoint = Path(data_config.run_dir) / "checkpoints" / f"step_{summary['steps']}"
    assert (checkpoint / "model.safetensors").is_file()


@pytest.mark.long
def test_a_run_whose_loop_is_blocked_is_left_behind_and_the_notebook_lives_on(
    data_config: penstock.RunConfig,
) -> None:
    code, rest = signalled(data_config, ["kernel", "blocks"], "blocks the loop", signal.SIGINT, times=2)
    assert "KeyboardInterrupt: interrupted while the event loop was blocked in" in rest
    assert "in run" in rest
    assert "handler is back: True" in rest
    assert code == 0, rest
    summary = json.loads((Path(data_config.run_dir) / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "interrupted"

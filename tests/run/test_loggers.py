"""Whole runs with loggers: what reaches them, and that nothing they do reaches the run."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import SetupError
from penstock.observe.loggers.base import Outcome, RunInfo
from tests.run.conftest import ConfigMaker
from tests.run.test_documented import documented
from tests.run.test_train import lines, steps
from tests.support.loggers import (
    Remembering,
    failing_at,
    mlflow_run,
    tensorboard_events,
    wandb_records,
    wandb_values,
)
from tests.test_docs import blocks

ALL = {"console": "off", "tensorboard": {}, "wandb": {}, "mlflow": {}, "prometheus": {"port": 0}}
KEY = "train/reward_mean"


class PageReader:
    """Reads the Prometheus page from inside the run, at its second step."""

    name = "page_reader"

    def __init__(self, events: Path) -> None:
        self._events = events
        self.page = ""

    def start(self, run: RunInfo) -> str:
        places = {line["logger"]: line["place"] for line in lines(self._events) if line["event"] == "logger_started"}
        self._address = places["prometheus"]
        return "nowhere"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            with urllib.request.urlopen(self._address, timeout=5) as answer:
                self.page = answer.read().decode()

    def summary(self, outcome: Outcome, values: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def test_all_loggers_have_what_the_run_wrote_itself(
    make_config: ConfigMaker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = PageReader(tmp_path / "run" / "events.jsonl")
    result = penstock.train(make_config(observe=ALL), loggers=[reader])
    wanted = [(line["step"], pytest.approx(line[KEY])) for line in steps(result.run_dir)]
    assert len(wanted) == 3
    assert capfd.readouterr() == ("", "")

    scalars = tensorboard_events(result.run_dir / "tensorboard").Scalars(KEY)
    assert [(event.step, event.value) for event in scalars] == wanted

    client, run = mlflow_run(result.run_dir / "mlflow")
    assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, KEY)] == wanted
    assert (run.info.status, run.data.params["rollout.group_size"]) == ("FINISHED", "3")
    assert [m.step for m in client.get_metric_history(run.info.run_id, "eval/reward_mean")] == [0, 3]

    (path,) = (result.run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    rows = [wandb_values(record.history.item) for record in wandb_records(path) if record.HasField("history")]
    assert [(row["_step"], row[KEY]) for row in rows if KEY in row] == wanted
    assert [row["_step"] for row in rows if "eval/reward_mean" in row] == [0, 3]

    assert "penstock_train_reward_mean " in reader.page
    assert 'penstock_staleness_lag_histogram{lag="0"} ' in reader.page
    assert 'penstock_events_total{event="weights_published"} ' in reader.page


def test_a_logger_that_raises_does_not_stop_the_run(make_config: ConfigMaker) -> None:
    sound = Remembering("sound")
    result = penstock.train(make_config(), loggers=[Remembering("broken", failing_at("log")), sound])
    assert result.stopped_by == "max_steps"
    events = lines(result.run_dir / "events.jsonl")
    (failed,) = [line for line in events if line["event"] == "logger_failed"]
    assert (failed["logger"], failed["cause"]) == ("broken", "RuntimeError: the disk is full")
    assert events[-1]["event"] == "run_ended"
    assert [call[1] for call in sound.calls if call[0] == "log"] == [0, 1, 2, 3, 3]
    assert sound.calls[-2] == ("summary", Outcome.FINISHED, result.summary)
    settings = sound.calls[0][1].settings
    assert settings["training.optimizer.lr"] == 1e-3
    assert not any(key.startswith("observe.") for key in settings)


def test_a_logger_that_cannot_start_ends_the_run_before_it_begins(make_config: ConfigMaker, tmp_path: Path) -> None:
    first = Remembering("first")
    with pytest.raises(SetupError, match=r"observe\.broken: could not be started: RuntimeError: the disk is full"):
        penstock.train(make_config(), loggers=[first, Remembering("broken", failing_at("start"))])
    assert first.calls[1][:2] == ("summary", Outcome.FAILED)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 0
    assert penstock.train(make_config()).stopped_by == "max_steps"


@pytest.mark.parametrize("event", ["logger_started", "logger_failed", "logger_behind", "logger_gaps"])
def test_events_of_loggers_are_documented(event: str) -> None:
    assert event in documented()


def test_the_logger_of_the_documentation_works(make_config: ConfigMaker) -> None:
    page = (Path(__file__).parents[2] / "docs" / "loggers.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(next(block.code for block in blocks(page) if block.info == "python"), namespace)
    result = penstock.train(make_config(), loggers=[namespace["CsvLogger"]()])
    rows = (result.run_dir / "reward.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3", "finished"]

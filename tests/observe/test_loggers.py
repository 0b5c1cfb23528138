"""All loggers as one: order, isolation, time limits, and what they are told."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.sections.observe import ObserveConfig
from penstock.errors import SetupError
from penstock.observe.events import EventLog
from penstock.observe.loggers.base import MetricName, Outcome, RunInfo, flat_settings
from penstock.observe.loggers.checks import check_loggers
from penstock.observe.loggers.factory import make_loggers
from penstock.observe.loggers.fanout import Loggers
from tests.support.loggers import Call, Remembering, failing_at, waiting_in

RUN = RunInfo("first", Path("unused"), {"seed": 1})


class Recorded(EventLog):
    """An event log that keeps the fields."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.subscribe(lambda name, fields: self.seen.append((name, dict(fields))))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.seen if event == name]


async def test_every_logger_gets_everything_in_order_from_one_thread() -> None:
    first, second, events = Remembering("a"), Remembering("b"), Recorded()
    loggers = Loggers([first, second], events)
    assert await loggers.start(RUN) == {"a": "here", "b": "here"}
    loggers.log(0, {"eval/reward_mean": 0.5})
    loggers.log(1, {"step": 1.0, "train/loss": 2.0})
    loggers.close(Outcome.FINISHED, {"steps": 1})
    wanted = [
        ("start", RUN),
        ("log", 0, {"eval/reward_mean": 0.5}),
        ("log", 1, {"train/loss": 2.0}),
        ("summary", Outcome.FINISHED, {"steps": 1}),
        ("close",),
    ]
    for logger in (first, second):
        assert logger.calls == wanted
        assert len(logger.threads) == 1
        assert threading.get_ident() not in logger.threads
    assert events.seen == [("logger_started", {"logger": name, "place": "here"}) for name in "ab"]


@pytest.mark.parametrize("call", ["log", "summary", "close"])
async def test_a_logger_that_raises_gives_one_event_and_is_switched_off(call: str) -> None:
    broken, sound, events = Remembering("broken", failing_at(call)), Remembering("sound"), Recorded()
    loggers = Loggers([broken, sound], events)
    await loggers.start(RUN)
    for step in range(3):
        loggers.log(step, {})
    loggers.close(Outcome.FINISHED, {})
    assert events.of("logger_failed") == [{"logger": "broken", "cause": "RuntimeError: the disk is full"}]
    assert [name for name, *_ in sound.calls] == ["start", "log", "log", "log", "summary", "close"]
    assert [name for name, *_ in broken.calls].count("log") == (0 if call == "log" else 3)
    assert ("close",) in broken.calls or call == "close"


async def test_a_logger_that_asks_to_exit_does_not_end_the_run() -> None:
    events = Recorded()
    loggers = Loggers([Remembering("rude", failing_at("log", SystemExit(3)))], events)
    await loggers.start(RUN)
    loggers.log(1, {})
    loggers.close(Outcome.FINISHED, {})
    assert events.of("logger_failed") == [{"logger": "rude", "cause": "SystemExit: 3"}]


async def test_a_logger_that_hangs_stalls_nobody_and_close_returns_within_its_limit() -> None:
    never = threading.Event()
    hanging = Remembering("hanging", waiting_in("log", never))
    sound, events = Remembering("sound"), Recorded()
    loggers = Loggers([hanging, sound], events, close_seconds=0.2)
    await loggers.start(RUN)
    started = time.monotonic()
    for step in range(100):
        loggers.log(step, {})
    assert time.monotonic() - started < 10, "a logger that hangs would hold it up for ever"
    started = time.monotonic()
    loggers.close(Outcome.FINISHED, {})
    assert 0.2 <= time.monotonic() - started < 20.0
    (failed,) = events.of("logger_failed")
    assert failed["logger"] == "hanging"
    assert failed["cause"].startswith("did not close within 0.2 s")
    assert sound.calls[-1] == ("close",)
    never.set()


async def test_a_straggler_has_nothing_to_say_once_all_is_closed(tmp_path: Path) -> None:
    go_on, raised = threading.Event(), threading.Event()

    def late(call: Call) -> None:
        if call[0] == "log":
            go_on.wait()
            raise RuntimeError("too late")
        if call[0] == "close":
            raised.set()

    events = EventLog(tmp_path / "events.jsonl")
    loggers = Loggers([Remembering("late", late)], events, close_seconds=0.05)
    await loggers.start(RUN)
    loggers.log(1, {})
    loggers.close(Outcome.FINISHED, {})
    events.close()
    go_on.set()
    assert raised.wait(30)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["logger_started", "logger_failed"]


async def test_a_full_queue_loses_the_oldest_and_counts_them() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(call: Call) -> None:
        if call[0] == "log":
            entered.set()
            go_on.wait()

    logger, events = Remembering("slow", slow), Recorded()
    loggers = Loggers([logger], events, queued_records=2)
    await loggers.start(RUN)
    loggers.log(0, {})
    assert entered.wait(30)
    for step in range(1, 6):
        loggers.log(step, {})
    assert events.of("logger_behind") == [{"logger": "slow", "queued": 2, "step": 3}]
    go_on.set()
    loggers.close(Outcome.FINISHED, {})
    assert [call[1] for call in logger.calls if call[0] == "log"] == [0, 4, 5]
    assert events.of("logger_gaps") == [{"logger": "slow", "dropped": 3}]
    assert events.of("logger_failed") == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SetupError("observe.broken.port: 9 is in use"), r"^observe\.broken\.port: 9 is in use$"),
        (OSError("no route"), r"^observe\.broken: could not be started: OSError: no route$"),
        (TimeoutError("30 s"), r"^observe\.broken: could not be started: TimeoutError: 30 s$"),
    ],
)
async def test_what_cannot_start_is_an_error_and_the_others_are_closed(error: Exception, message: str) -> None:
    sound, later = Remembering("sound"), Remembering("later")
    loggers = Loggers([sound, Remembering("broken", failing_at("start", error)), later], Recorded())
    with pytest.raises(SetupError, match=message):
        await loggers.start(RUN)
    loggers.close(Outcome.FAILED, {})
    loggers.close(Outcome.FAILED, {})
    assert sound.calls[1:] == [("summary", Outcome.FAILED, {}), ("close",)]
    assert later.calls == []


async def test_a_start_that_hangs_is_given_up_and_close_does_not_wait_for_it() -> None:
    never = threading.Event()
    loggers = Loggers([Remembering("slow", waiting_in("start", never))], Recorded(), start_seconds=0.05)
    with pytest.raises(SetupError, match=r"observe\.slow: did not start within 0\.05 s"):
        await loggers.start(RUN)
    started = time.monotonic()
    loggers.close(Outcome.FAILED, {})
    assert time.monotonic() - started < 20.0
    never.set()


async def test_a_start_can_be_interrupted_and_the_logger_is_closed_once_it_gets_there() -> None:
    entered, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(call: Call) -> None:
        if call[0] == "start":
            entered.set()
            go_on.wait()
        if call[0] == "close":
            closed.set()

    logger = Remembering("slow", slow)
    loggers = Loggers([logger], Recorded())
    starting = asyncio.create_task(loggers.start(RUN))
    assert await asyncio.to_thread(entered.wait, 5)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    loggers.close(Outcome.INTERRUPTED, {})
    go_on.set()
    assert closed.wait(30)
    assert logger.calls[1] == ("summary", Outcome.INTERRUPTED, {})


def test_no_logger_is_made_unless_asked_for() -> None:
    assert make_loggers(ObserveConfig(), EventLog()) == []


@pytest.mark.parametrize(
    ("section", "module", "requirement"),
    [
        ("tensorboard", "tensorboard", "tensorboard>=2.15"),
        ("wandb", "wandb", "wandb>=0.31"),
        ("mlflow", "mlflow", "mlflow-skinny>=2.15"),
        ("prometheus", "prometheus_client", "prometheus-client>=0.20"),
    ],
)
def test_missing_package_names_the_setting_and_the_command(
    section: str, module: str, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    (logger,) = make_loggers(ObserveConfig.model_validate({section: {}}), EventLog())
    with pytest.raises(SetupError, match=rf"^observe\.{section}: needs .* pip install '{requirement}'$"):
        logger.start(RunInfo("first", tmp_path))
    with pytest.raises(SetupError, match=rf"^observe\.{section}: needs .* pip install '{requirement}'$"):
        check_loggers(ObserveConfig.model_validate({section: {}}))


class TestChecks:
    """What `penstock config check` finds out without starting anything."""

    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            ({"mlflow": {"tracking_uri": "foo://bar"}}, r"tracking_uri: 'foo://bar' has the scheme 'foo'"),
            ({"mlflow": {"tracking_uri": "http:///x"}}, r"tracking_uri: 'http:///x' names no host"),
            ({"prometheus": {"host": "no.such.host.invalid"}}, r"prometheus\.host: cannot listen on 'no\.such"),
            ({"prometheus": {"host": "192.0.2.1", "port": 0}}, r"prometheus\.host: cannot listen on '192\.0\.2\.1'"),
        ],
    )
    def test_what_could_not_start_is_found(self, sections: dict[str, Any], message: str) -> None:
        with pytest.raises(SetupError, match=rf"^observe\..*{message}"):
            check_loggers(ObserveConfig.model_validate(sections))

    def test_a_port_in_use(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(SetupError, match=rf"^observe\.prometheus\.port: {port} on 127\.0\.0\.1 is in use"):
                check_loggers(ObserveConfig.model_validate({"prometheus": {"port": port}}))

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SetupError, match=r"^observe\.tensorboard\.folder: .* cannot be written"):
            check_loggers(ObserveConfig.model_validate({"tensorboard": {"folder": str(tmp_path / "file" / "x")}}))

    def test_offline_and_online_at_the_same_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        with pytest.raises(SetupError, match=r"^observe\.wandb\.mode: is online, but"):
            check_loggers(ObserveConfig.model_validate({"wandb": {"mode": "online"}}))

    def test_what_can_start_is_let_pass_and_leaves_nothing(self, tmp_path: Path) -> None:
        sections = {
            "tensorboard": {"folder": str(tmp_path / "a" / "b")},
            "wandb": {},
            "mlflow": {"tracking_uri": "https://mlflow.example.org"},
            "prometheus": {"port": 0},
        }
        check_loggers(ObserveConfig.model_validate(sections))
        assert list(tmp_path.iterdir()) == []


def test_settings_are_flat_and_without_what_is_no_hyper_parameter() -> None:
    config = {
        "seed": 3,
        "data": {"train_path": None, "shuffle": True},
        "training": {"optimizer": {"lr": 1e-6, "betas": [0.9, 0.99]}},
        "observe": {"console": "off"},
    }
    assert flat_settings(config) == {
        "seed": 3,
        "data.shuffle": True,
        "training.optimizer.lr": 1e-6,
        "training.optimizer.betas": "[0.9, 0.99]",
    }


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("step", MetricName("step")),
        ("train/loss", MetricName("train/loss")),
        ("staleness/lag_histogram/2", MetricName("staleness/lag_histogram", "lag", "2")),
        (
            "train/reward_mean/verifiers:team/gsm8k",
            MetricName("train/reward_mean", "environment", "verifiers:team/gsm8k"),
        ),
    ],
)
def test_what_follows_section_and_name_is_a_label(key: str, name: MetricName) -> None:
    assert MetricName.parse(key) == name


@given(st.text())
def test_no_part_of_a_key_gets_lost(key: str) -> None:
    name = MetricName.parse(key)
    assert key == (name.base if name.value is None else f"{name.base}/{name.value}")

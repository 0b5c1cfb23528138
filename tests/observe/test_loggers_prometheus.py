"""The page for Prometheus, read as its server reads it."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.config.sections.observe import PrometheusConfig
from penstock.errors import SetupError
from penstock.observe.events import EventLog
from penstock.observe.loggers.base import Outcome, RunInfo
from penstock.observe.loggers.prometheus import PrometheusLogger, gauge_name

RUN = RunInfo("first", Path("unused"), {"model.path": 'a "model"', "rollout.environment.kind": "math"})
Starter = Callable[..., tuple[PrometheusLogger, str]]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def started() -> Iterator[Starter]:
    """Starts loggers on free ports and closes them at the end."""
    loggers = []

    def start(counts: dict[str, int] | None = None, **settings: Any) -> tuple[PrometheusLogger, str]:
        logger = PrometheusLogger(PrometheusConfig(**{"port": 0, **settings}), lambda: counts or {})
        address = logger.start(RUN)
        loggers.append(logger)
        return logger, address

    yield start
    for logger in loggers:
        logger.close()


def read(address: str) -> Samples:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(address, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_page_has_the_newest_value_of_every_metric(started: Starter) -> None:
    logger, address = started()
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/metrics")
    logger.log(0, {"eval/reward_mean": 0.25})
    logger.log(1, {"train/reward_mean": 0.5})
    logger.log(2, {"train/reward_mean": 0.625, "train/reward_mean/math": 0.5, "train/reward_mean/a/b": 0.75})
    samples = read(address)
    assert samples["penstock_step", ()] == 2
    assert samples["penstock_eval_reward_mean", ()] == 0.25
    assert samples["penstock_train_reward_mean", ()] == 0.625
    assert samples["penstock_train_reward_mean", (("environment", "math"),)] == 0.5
    assert samples["penstock_train_reward_mean", (("environment", "a/b"),)] == 0.75


def test_a_lag_that_no_group_has_any_more_is_gone(started: Starter) -> None:
    logger, address = started()
    logger.log(1, {"staleness/lag_histogram/0": 3.0, "staleness/lag_histogram/1": 1.0})
    logger.log(2, {"staleness/lag_histogram/1": 4.0})
    logger.log(2, {"eval/reward_mean": 0.25})
    found = {key: value for key, value in read(address).items() if key[0] == "penstock_staleness_lag_histogram"}
    assert found == {("penstock_staleness_lag_histogram", (("lag", "1"),)): 4.0}


def test_events_are_counted_by_name_and_the_run_is_described(started: Starter) -> None:
    _, address = started({"prompt_dropped": 3, "run_started": 1})
    samples = read(address)
    assert samples["penstock_events_total", (("event", "prompt_dropped"),)] == 3
    facts = {"environment": "math", "model": 'a "model"', "run": "first", "version": __version__}
    assert samples["penstock_run_info", tuple(sorted(facts.items()))] == 1
    assert samples["penstock_run_start_time_seconds", ()] > 1e9


def test_counts_are_those_of_the_moment_the_page_is_read() -> None:
    events = EventLog()
    logger = PrometheusLogger(PrometheusConfig(port=0), lambda: events.counts)
    address = logger.start(RUN)
    for expected in (1, 2):
        events.emit("rollout_retried")
        assert read(address)["penstock_events_total", (("event", "rollout_retried"),)] == expected
    logger.close()


def test_two_runs_in_one_process_do_not_see_each_other(started: Starter) -> None:
    (first, first_address), (_, second_address) = started(), started()
    first.log(1, {"train/loss": 1.0})
    assert ("penstock_train_loss", ()) in read(first_address)
    assert ("penstock_train_loss", ()) not in read(second_address)


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"^observe\.prometheus\.port: {port} on 127\.0\.0\.1 is in use"):
            PrometheusLogger(PrometheusConfig(port=port), dict).start(RUN)


def test_an_address_that_is_not_ours_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"^observe\.prometheus\.host: cannot listen on '192\.0\.2\.1'"):
        PrometheusLogger(PrometheusConfig(port=0, host="192.0.2.1"), dict).start(RUN)


def test_page_and_thread_end_with_the_run() -> None:
    before = set(threading.enumerate())
    logger = PrometheusLogger(PrometheusConfig(port=0), dict)
    address = logger.start(RUN)
    read(address)
    assert set(threading.enumerate()) - before
    logger.summary(Outcome.FINISHED, {})
    logger.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    with pytest.raises(OSError):
        read(address)


@pytest.mark.parametrize("key", ["train/reward_mean", "a b/c-d.e:f", "train/größe"])
def test_names_are_what_prometheus_allows(key: str) -> None:
    assert re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", gauge_name(key))

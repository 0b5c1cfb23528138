"""Everything a run shows and writes about itself, opened together and closed in order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from penstock.config.loading import dump_config
from penstock.config.models import RunConfig
from penstock.config.yaml_dialect import parse_yaml
from penstock.controller.failure import describe
from penstock.errors import PenstockError, RecordError
from penstock.observe.console import make_console
from penstock.observe.events import EventLog
from penstock.observe.jsonl import JsonlWriter
from penstock.observe.loggers.base import Logger, Outcome, RunInfo, flat_settings
from penstock.observe.loggers.factory import make_loggers
from penstock.observe.loggers.fanout import Loggers
from penstock.observe.report.build import write_report
from penstock.observe.samples import SampleLog
from penstock.observe.timeline import Timeline
from penstock.run.directory import RunDirectory
from penstock.run.recorder import Recorder

_OUTCOMES = {"error": Outcome.FAILED, "interrupted": Outcome.INTERRUPTED}


class RunRecords:
    """Console, events, metrics, samples, timeline, loggers, summary and report of one run.

    What is on this machine is closed first, and the report written, before anybody waits for loggers: one that hangs,
    or a second Ctrl-C, costs nothing that is already there. Each part is closed whatever became of the others; what
    could not be written is said, and raised by `close` where the run did not fail anyway.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, loggers: Sequence[Logger]) -> None:
        self._config = config
        self._directory = directory
        self._problems: list[str] = []
        with ExitStack() as opened:
            self.view = make_console(config.observe.console, config.training.max_steps)
            opened.callback(self.view.close)
            self.events = EventLog(directory.events)
            opened.callback(self.events.close)
            self.events.subscribe(self.view.on_event)
            self.timeline = Timeline.to_file(directory.trace) if config.observe.trace else Timeline.off()
            opened.callback(self.timeline.close)
            self.events.subscribe(self.timeline.on_event)
            self.lane = self.timeline.lane("controller", "run")
            self.ledger = JsonlWriter(directory.ledger)
            opened.callback(self.ledger.close)
            self.samples = SampleLog(directory.samples, config.observe.samples_per_step)
            self._loggers = Loggers([*make_loggers(config.observe, self.events), *loggers], self.events)
            self.metrics = Recorder(directory.metrics, self.view, self._loggers)
            opened.pop_all()

    async def start(self) -> None:
        """The run begins: start the loggers, and say where to find what they write."""
        self.events.emit("run_started", run_dir=str(self._directory.path))
        self.view.note(f"setting up; files go to {self._directory.path}")
        settings = flat_settings(parse_yaml(dump_config(self._config)))
        path = self._directory.path
        places = await self._loggers.start(RunInfo(path.resolve().name, path, settings))
        for name, place in places.items():
            self.view.note(f"{name}: {place}")

    def failed(self, error: BaseException) -> None:
        """The run ends because of this."""
        self.metrics.error = describe(error)
        self._attempt(lambda: self.events.emit("run_failed", cause=self.metrics.error))

    def last_words(self, stopped_by: str, why: str) -> None:
        """The process ends now, and the event loop cannot record it: summary and events, from any thread."""
        self.metrics.error = why
        self._attempt(lambda: self._directory.write_summary(self.metrics.summary(stopped_by)))
        self._attempt(lambda: self.events.emit("run_failed", cause=why))
        self._attempt(lambda: self.events.emit("run_ended", stopped_by=stopped_by, steps=self.metrics.steps))
        self._attempt(self.events.close)
        self._attempt(lambda: sys.stderr.write(f"penstock: {why}\n"))

    def hurry(self) -> None:
        """Do not wait for loggers any longer."""
        self._loggers.hurry()

    async def close(self, stopped_by: str) -> dict[str, Any]:
        """The run is over: the content of `summary.json`. `RecordError` where the end could not be recorded."""
        summary = self.metrics.summary(stopped_by)
        self._attempt(lambda: self._directory.write_summary(summary))
        self._attempt(lambda: self.events.emit("run_ended", stopped_by=stopped_by, steps=summary["steps"]))
        for part in (self.metrics, self.samples, self.ledger, self.timeline):
            self._attempt(part.close)
        self._write_report()
        try:
            await self._close_loggers(_OUTCOMES.get(stopped_by, Outcome.FINISHED), summary)
        finally:
            self._attempt(self.events.close)
            for problem in self._problems:
                self.view.note(f"  ! {problem}")
            self.view.close()
        if self._problems and self.metrics.error is None:
            raise RecordError(f"the run ended ({stopped_by}), but {self._problems[0]}")
        return summary

    async def _close_loggers(self, outcome: Outcome, summary: dict[str, Any]) -> None:
        """Wait for them in a thread, so that signals are heard; write the report again where one had a problem."""
        before = self.events.counts
        closing = asyncio.ensure_future(asyncio.to_thread(self._loggers.close, outcome, summary, self.view.note))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            self.hurry()
            await closing
        if self.events.counts != before:
            self._write_report(again=True)

    def _write_report(self, *, again: bool = False) -> None:
        """Write `report.html` where there is something to tell; a failure is only an event, as the run is over."""
        try:
            if self._directory.metrics.stat().st_size:
                path = write_report(self._directory.path).path
                if not again:
                    self.view.note(f"report: {path}")
        except Exception as error:  # noqa: BLE001 - whatever it was, it must not change how the run ended
            cause = describe(error)
            self._attempt(lambda: self.events.emit("report_failed", cause=cause))

    def _attempt(self, act: Callable[[], object]) -> None:
        """Do one thing of the end; what goes wrong is kept for later, and the rest of the end goes on."""
        try:
            act()
        except PenstockError as error:
            self._problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - the other parts must be closed too
            self._problems.append(describe(error))

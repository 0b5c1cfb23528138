"""Everything a run shows and writes about itself, opened together and closed in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from penstock.algorithms.custom import CustomCodeError
from penstock.config.models import RunConfig
from penstock.config.reading.loading import dump_config
from penstock.config.reading.yaml_dialect import parse_yaml
from penstock.controller.failures.classify import causes, describe
from penstock.errors import PenstockError, RecordError, RunDirectoryLost
from penstock.observe.display import Display
from penstock.observe.events import EventLog
from penstock.observe.jsonl import JsonlWriter
from penstock.observe.loggers.base import Logger, Outcome, RunInfo, flat_settings
from penstock.observe.loggers.factory import make_loggers
from penstock.observe.loggers.fanout import Loggers
from penstock.observe.report.build import write_report
from penstock.observe.samples import SampleLog
from penstock.observe.streams import say_last
from penstock.observe.timeline import Timeline
from penstock.run.directory import RunDirectory
from penstock.run.file_marks import FilesSnapshot
from penstock.run.given_objects import way_to_resume
from penstock.run.metrics_log import MetricsLog
from penstock.run.provenance import provenance
from penstock.runtime.threads import in_daemon_thread

_OUTCOMES = {"error": Outcome.FAILED, "interrupted": Outcome.INTERRUPTED}


class RunLog:
    """Console, events, metrics, samples, timeline, loggers, summary and report of one run.

    What is on this machine is closed first, and the report written, before anything waits for loggers: one that hangs,
    or a second Ctrl-C, costs nothing that is already there. Each part is closed even if others fail; what could not be
    written is reported, and raised by `close` if the run did not fail anyway.

    Nothing is written before `open`: a run that cannot resume leaves its folder as it was. What happens before then is
    kept in memory, and written by `open`.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        loggers: Sequence[Logger],
        json_to: TextIO | None = None,
    ) -> None:
        """With `json_to`, steps and evaluations go there as JSON lines, instead of what `observe.console` shows."""
        self._config = config
        self._directory = directory
        self._origin = provenance(config.seed) | {"runtime": config.runtime.kind}
        self._way_on = way_to_resume(config, directory.path)
        self._problems: list[str] = []
        self._restarts = 0
        self._opened = False
        self._files_open = False
        """Whether metrics, samples and ledger are; between a loss and the checkpoint that the run goes back to they are
        not."""
        self._lost = False
        """The folder under the run's path is no longer its own."""
        self.events = EventLog(directory.events, opened=False)
        trace = config.observe.trace
        self.timeline = Timeline.to_file(directory.trace, opened=False) if trace else Timeline.off()
        self.track = self.timeline.track("controller", "run")
        self._loggers = Loggers([*make_loggers(config.observe, self.events), *loggers], self.events)
        self.view = Display(config.observe.console, config.training.max_steps, self.events.emit, json_to)
        self.events.subscribe(self.view.on_event)
        self.events.subscribe(self.timeline.on_event)
        self._loggers_started = False
        self.ledger, self.samples, self.metrics = self._files()

    def _files(self) -> tuple[JsonlWriter, SampleLog, MetricsLog]:
        """What a resume rolls back, to be opened."""
        return (
            JsonlWriter(self._directory.ledger, opened=False),
            SampleLog(self._directory.samples, self._config.observe.samples_per_step),
            MetricsLog(self._directory.metrics, self.view, self._loggers),
        )

    @property
    def is_open(self) -> bool:
        """Whether the run has begun to write: it is a new one, or what it resumes from was accepted."""
        return self._opened

    def open(self) -> None:
        """Start writing: the run has begun, or what it resumes from was accepted."""
        if not self._opened:
            self.events.open()
            self.timeline.open()
        self._opened = self._files_open = True
        for part in (self.ledger, self.samples, self.metrics):
            part.open()

    def start_over(self, restarts: int) -> None:
        """The run goes back to a checkpoint in this process, for the `restarts`-th time.

        Its files are let go, so that nobody who is left of what was lost writes to them; they are rolled back, and
        opened again, once the checkpoint is loaded. Console, events, timeline and loggers go on.
        """
        self._restarts = restarts
        self._files_open = False
        for part in (self.metrics, self.samples, self.ledger):
            part.close()
        before = self.metrics
        self.ledger, self.samples, self.metrics = self._files()
        self.metrics.train_seconds, self.metrics.tokens_generated = before.train_seconds, before.tokens_generated
        self.timeline.end_all()
        self.events.forget_counts()

    async def start(self) -> None:
        """The run begins: record it, with this process's provenance, and start the loggers if files are open."""
        path, run_id = self._directory.path, self._directory.run_id
        self.events.emit("run_started", run_dir=str(path), run_id=run_id, **self._origin)
        self.view.open()
        self.view.note(f"setting up; writing to {path}")
        if self._opened:
            await self.start_loggers()

    async def start_loggers(self) -> None:
        """Start them, and say where to find what they write; a second call does nothing."""
        if self._loggers_started:
            return
        self._loggers_started = True
        settings = flat_settings(parse_yaml(dump_config(self._config)))
        path = self._directory.path
        places = await self._loggers.start(RunInfo(path.resolve().name, path, settings))
        for name, place in places.items():
            self.view.note(f"{name}: {place}")

    def require_place(self) -> None:
        """Raise if what is about to be written would be lost, or would land in another run.

        `RunDirectoryLost` if it is the folder, `RecordError` if it is only a file in it.
        """
        self._directory.require()
        for file in (self.metrics.file, self.ledger):
            if not file.is_in_place():
                raise RecordError(
                    f"{str(file.path)!r} was deleted, replaced or changed during the run, so the run's records "
                    f"would be lost. Put the file back and resume from the last checkpoint: {self._way_on}; or start "
                    "over with --from-scratch (from_scratch=True in Python)"
                )

    def snapshot(self, begun: FilesSnapshot | None = None) -> FilesSnapshot:
        """What the files hold now, for a checkpoint of this moment, or one `begun` before its step was recorded.

        The ledger keeps growing, as prompts can end at any moment: its mark is the one from the beginning.
        """
        names = self._directory
        marks = {names.metrics.name: self.metrics.file.mark(), names.ledger.name: self.ledger.mark()}
        if (samples := self.samples.mark()) is not None:
            marks[names.samples.name] = samples
        if begun is not None:
            marks[names.ledger.name] = begun.marks[names.ledger.name]
        return FilesSnapshot(names.run_id, marks, self._sync)

    def _sync(self) -> None:
        for part in (self.metrics.file, self.ledger, self.samples, self.events):
            part.sync()

    def failed(self, error: BaseException) -> None:
        """The run ends because of this."""
        self._lost = isinstance(error, RunDirectoryLost)
        self.metrics.error = describe(error)
        traces = [link.trace for link in causes(error) if isinstance(link, CustomCodeError) and link.trace is not None]
        where = {"traceback": traces[0].traceback} if traces else {}
        self._attempt(lambda: self.events.emit("run_failed", cause=self.metrics.error, **where))

    def last_words(self, stopped_by: str, why: str) -> None:
        """The process ends now, and the event loop cannot record it: summary and events, from any thread.

        As in `close`, a run whose files were never opened, or whose folder is lost, leaves everything unchanged.
        """
        self.metrics.error = why
        if self._writes_by_name:
            if not self._files_open:
                self._attempt(self.metrics.recall)
            summary = self._summary(stopped_by)
            self._attempt(lambda: self._directory.write_summary(summary))
            self._attempt(lambda: self.events.emit("run_failed", cause=why))
            self._attempt(lambda: self.events.emit("run_ended", stopped_by=stopped_by, steps=self.metrics.steps))
            self._attempt(self.events.close)
        way_on = "" if self._lost else f"resume with: {self._way_on}\n"
        self._attempt(lambda: say_last(f"penstock: {why}\n{way_on}"))

    def hurry(self) -> None:
        """Stop waiting for loggers."""
        self._loggers.hurry()

    async def close(self, stopped_by: str) -> dict[str, Any]:
        """The run is over: returns the content of `summary.json`. `RecordError` if the end could not be recorded.

        A run that was refused before its files were opened leaves them all unchanged.
        """
        if self._files_open and self.metrics.error is None:
            self._attempt(self.require_place)
        elif not self._files_open:
            self._attempt(self.metrics.recall)
        summary = self._summary(stopped_by)
        if self._writes_by_name:
            self._attempt(lambda: self._directory.write_summary(summary))
        self._attempt(lambda: self.events.emit("run_ended", stopped_by=stopped_by, steps=summary["steps"]))
        for part in (self.metrics, self.samples, self.ledger, self.timeline):
            self._attempt(part.close)
        self._write_report()
        try:
            await self._close_loggers(_OUTCOMES.get(stopped_by, Outcome.FINISHED), summary)
        finally:
            self.view.settle()
            self._attempt(self.events.close)
            for problem in self._problems:
                self.view.note(f"  ! {problem}")
            self.view.close()
        if self._problems and self.metrics.error is None:
            raise RecordError(f"the run ended ({stopped_by}), but {self._problems[0]}")
        return summary

    def _summary(self, stopped_by: str) -> dict[str, Any]:
        restarts = {"restarts": self._restarts} if self._restarts else {}
        return self.metrics.summary(stopped_by) | restarts | {"run_id": self._directory.run_id}

    @property
    def _writes_by_name(self) -> bool:
        return self._opened and not self._lost

    async def _close_loggers(self, outcome: Outcome, summary: dict[str, Any]) -> None:
        """Wait for them in a thread, so signals are heard; write the report again if one had a problem.

        A cancellation, as often as it comes, only ends the wait: how the run ended is known by now.
        """
        before = self.events.counts
        closing = in_daemon_thread("penstock-loggers", self._loggers.close, outcome, summary, self.view.note)
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                self.hurry()
        closing.result()
        if self.events.counts != before:
            self._write_report(again=True)

    def _write_report(self, *, again: bool = False) -> None:
        """Write `report.html`, even for a run that trained nothing; a failure is only an event, as the run is over."""
        if not self._writes_by_name:
            return
        try:
            self._directory.require()
            path = write_report(self._directory.path).path
            if not again:
                self.view.note(f"report: {path}")
        except Exception as error:  # noqa: BLE001 - whatever it was, it must not change how the run ended
            cause = describe(error)
            self._attempt(lambda: self.events.emit("report_failed", cause=cause))

    def _attempt(self, act: Callable[[], object]) -> None:
        """Do one part of the shutdown; an error is kept for later, and the rest of the shutdown continues."""
        try:
            act()
        except PenstockError as error:
            self._lost = self._lost or isinstance(error, RunDirectoryLost)
            self._problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - the other parts must be closed too
            self._problems.append(describe(error))

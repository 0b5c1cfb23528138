"""The evaluations of a run: at its start, between two steps, and at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.config.models import RunConfig
from penstock.controller.failures.causes import FailureCauses
from penstock.controller.failures.classify import describe
from penstock.errors import EvaluationError
from penstock.observe.console import ProgressView
from penstock.observe.events import EventLog
from penstock.observe.timeline import Track
from penstock.run.eval_report import EvalReport
from penstock.run.evaluate import EvalParts, evaluate_prompts

_SHOWN_FAILURES = 8
"""How many failed responses of one evaluation get their own event; the rest are counted in the last."""


class Evaluations:
    """Evaluates when due, and reports it on the console, in the events and in the timeline.

    Between two steps the train pump waits in the controller's hook, so no weights change; rollouts continue and share
    the engine with the evaluation. An evaluation is abandoned when the run is told to end. One that finds nothing,
    because no response could be scored, is an error at the start, where nothing is lost, and an event later.
    """

    def __init__(
        self,
        parts: EvalParts,
        config: RunConfig,
        view: ProgressView,
        events: EventLog,
        track: Track,
        causes: FailureCauses | None = None,
    ) -> None:
        self._parts = parts
        self._config = config
        self._view = view
        self._events = events
        self._track = track
        self._causes = causes or FailureCauses(events)
        self.responses = 0
        """Responses that ended so far; grows while an evaluation makes progress."""

    async def at_start(self) -> EvalReport | None:
        """Evaluate the initial weights."""
        return await self._evaluate("at the start")

    async def at_end(self) -> EvalReport | None:
        """Evaluate the final weights."""
        return await self._or_event("at the end")

    async def made_up(self, step: int) -> EvalReport | None:
        """Evaluate the weights of `step`, from which the run resumes; its evaluation was cut short."""
        return await self._or_event(f"after step {step}")

    def due(self, step: int) -> bool:
        """Whether the weights of a step are to be evaluated when it has ended; those of step 0 are the initial ones."""
        every = self._config.eval.every_steps
        return every is not None and step % every == 0 if step else self._config.eval.at_start

    async def after_step(self, step: int, version: int, ending: asyncio.Event) -> EvalReport | None:
        """Evaluate the weights of `step`, which are `version`, if it is due; None if not, or if `ending` came first.

        A run that is told to end while running groups are drained leaves the engine behind the trainer: there is
        nothing to evaluate then.
        """
        if not self.due(step) or ending.is_set() or self._parts.engines.stats().version != version:
            return None
        return await _unless(ending, self._or_event(f"after step {step}"))

    async def _or_event(self, when: str) -> EvalReport | None:
        try:
            return await self._evaluate(when)
        except EvaluationError as error:
            self._events.emit("eval_failed", when=when, cause=describe(error))
            return None

    async def _evaluate(self, when: str) -> EvalReport | None:
        self._view.note(f"evaluating {when}")
        with self._track.span("evaluation", when=when):
            report = await evaluate_prompts(self._parts, self._config, self._count, self._causes)
        if report is None:
            self._view.note("no held-out prompts (data.eval_path): nothing to evaluate")
            return None
        self._view.note(f"{report.in_words()} {when}")
        told = list(zip(report.failures, report.failure_facts, strict=True))
        for failure, facts in told[:_SHOWN_FAILURES]:
            self._events.emit("eval_failed", when=when, cause=failure, **facts)
        if more := told[_SHOWN_FAILURES:]:
            last = max((facts for _, facts in more), key=lambda facts: int(facts.get("failed_by_count", 0)))
            self._events.emit("eval_failed", when=when, cause=f"{len(more)} more responses", **last)
        return report

    def _count(self) -> None:
        self.responses += 1


async def _unless(ending: asyncio.Event, work: Coroutine[Any, Any, EvalReport | None]) -> EvalReport | None:
    """What `work` returns, or None if `ending` is set before it is done; it is then cancelled."""
    evaluation = asyncio.create_task(work)
    told = asyncio.create_task(ending.wait())
    try:
        await asyncio.wait({evaluation, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        evaluation.cancel()
        await asyncio.wait({evaluation})
    return None if evaluation.cancelled() else evaluation.result()

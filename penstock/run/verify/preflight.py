"""`verify(config)`: all checks of a run, one after the other; none can keep the others from running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import torch

from penstock.config.models import RunConfig
from penstock.errors import WeightSyncError
from penstock.run.checks import check_config
from penstock.run.verify import (
    custom_loss,
    cut_off,
    gradients,
    memory,
    mismatch,
    prompts,
    rollouts,
    round_trip,
    weight_sync,
)
from penstock.run.verify.findings import (
    Check,
    CheckResult,
    Finding,
    NotChecked,
    SeenPrompt,
    Skipped,
    VerifyReport,
    raised,
)
from penstock.run.verify.seen_prompt import first_prompt
from penstock.run.verify.subject import Limits, Subject, built, sample, verifiable
from penstock.runtime.loop import run_loop
from penstock.weights.hf import pick_device, silence_progress_bars

Notify = Callable[[str], None]
"""Called with what is being done."""

ON_ROLLOUTS: tuple[tuple[Check, Callable[[Subject], Awaitable[Finding]]], ...] = (
    (rollouts.ROLLOUTS, rollouts.check_rollouts),
    (prompts.PROMPTS, prompts.check_prompts),
    (rollouts.REWARDS, rollouts.check_rewards),
    (rollouts.TRUNCATION, rollouts.check_truncation),
    (rollouts.SPREAD, rollouts.check_spread),
    (mismatch.MISMATCH, mismatch.check_mismatch),
    (cut_off.CUT_OFF, cut_off.check_cut_off),
    (gradients.GRADIENTS, gradients.check_gradients),
    (weight_sync.WEIGHT_SYNC, weight_sync.check_weight_sync),
    (round_trip.ROUND_TRIP, round_trip.check_round_trip),
)
"""In order: the last one clears the sampled rows."""
OF_CUSTOM_LOSSES = ((custom_loss.CUSTOM_LOSS, custom_loss.check_custom_loss),)
"""Checks for runs with the user's own loss."""


def verify(config: RunConfig, limits: Limits | None = None, notify: Notify | None = None) -> VerifyReport:
    """Check a run on its own model and data, after the checks of `config check`; trains nothing and writes nothing.

    Raises `ConfigError` or `SetupError` if the run could not be built at all.
    """
    config = verifiable(config)
    # Nothing is written, so a finished run in the folder does no harm.
    warnings = check_config(config, from_scratch=True)
    silence_progress_bars()
    report = run_loop(_Preflight(config, limits or Limits(), notify or (lambda text: None)).run())
    return replace(report, warnings=warnings)


class _Preflight:
    """One preflight: the memory estimate first, as the others need the model in memory."""

    def __init__(self, config: RunConfig, limits: Limits, notify: Notify) -> None:
        self._config = config
        self._limits = limits
        self._notify = notify
        self._ends = float("inf")
        extra = OF_CUSTOM_LOSSES if config.algorithm.loss.kind == "custom" else ()
        self._checks = (*ON_ROLLOUTS[:-1], *extra, ON_ROLLOUTS[-1])
        self._prompt: SeenPrompt | None = None

    async def run(self) -> VerifyReport:
        started = time.monotonic()
        first = await self._row(memory.MEMORY, lambda: memory.check_memory(self._config))
        figures = first.finding.figures
        if first.failed and figures and figures["loaded_bytes"] > figures["free_bytes"]:
            rest = self._skipped("not loaded: it does not fit in memory")
        else:
            rest = await self._with_model(may_fail=first.failed)
        device = str(pick_device(self._config.runtime.device))
        subject = {"model": self._config.model.path, "dtype": self._config.model.dtype, "device": device}
        return VerifyReport(subject, (*rest, first), time.monotonic() - started, self._prompt)

    async def _with_model(self, *, may_fail: bool) -> list[CheckResult]:
        """The checks that need the run's parts; with `may_fail`, running out of memory meanwhile is no surprise."""
        self._notify("loading the model")
        try:
            async with built(self._config) as (serving, training):
                self._ends = time.monotonic() + self._limits.seconds
                self._notify("generating a few prompt groups")
                sampled = await sample(self._config, training, self._limits)
                subject = Subject(self._config, serving, training, sampled)
                self._prompt = await first_prompt(subject)
                rows = [await self._row(check, partial(run, subject)) for check, run in self._checks]
                return [replace(rows[0], seconds=sampled.seconds), *rows[1:]]
        except WeightSyncError as error:
            failed = CheckResult(weight_sync.WEIGHT_SYNC, raised(error), 0.0, repr(error))
            rest = self._skipped("the engines could not load the trainer's weights")
            return [failed if row.check is failed.check else row for row in rest]
        except (MemoryError, torch.OutOfMemoryError) as error:
            if not may_fail:
                raise
            return self._skipped(f"memory ran out: {error}")

    async def _row(self, check: Check, run: Callable[[], Awaitable[Finding]]) -> CheckResult:
        """Run a check in half of the remaining time; anything it raises becomes its row."""
        self._notify(f"checking: {check.title}")
        started = time.monotonic()
        given = max(0.0, self._ends - started) / 2
        error: Exception | None = None
        try:
            async with asyncio.timeout(None if given == float("inf") else given):
                finding = await run()
        except TimeoutError as late:
            error = late
            text = (
                f"The check exceeded its time limit of {given:.3g} s; allow more with --seconds, or use fewer --groups"
            )
            finding = raised(NotChecked(text))
        except Exception as other:  # noqa: BLE001 - the row shows it, and the other checks still run
            error, finding = other, raised(other)
        return CheckResult(check, finding, time.monotonic() - started, None if error is None else repr(error))

    def _skipped(self, reason: str) -> list[CheckResult]:
        return [CheckResult(check, raised(Skipped(reason)), 0.0, reason) for check, _ in self._checks]

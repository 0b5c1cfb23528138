"""Every event a run can write: how much it matters to a person, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How much an event matters."""

    FAILURE = "failure"
    """Something went wrong, or something that should have been written is missing."""
    NOTABLE = "notable"
    """Nothing is wrong, but worth knowing; also events that this version does not know."""
    WASTE = "waste"
    """No failure, but a group was generated for nothing."""
    CHOSEN = "chosen"
    """The algorithm at work: a group was left out of training because the settings say so."""
    ROUTINE = "routine"
    """What every run has."""


@dataclass(frozen=True)
class EventKind:
    """What is known about all events of one name."""

    severity: Severity
    meaning: str


EVENT_KINDS: dict[str, EventKind] = {
    "run_failed": EventKind(Severity.FAILURE, "the run ended with an error"),
    "run_restarted": EventKind(
        Severity.FAILURE, "the trainer or the data plane was lost; the run went back to its last checkpoint by itself"
    ),
    "run_not_restarted": EventKind(
        Severity.FAILURE, "the trainer or the data plane was lost, and the run could not go back to a checkpoint"
    ),
    "stalled": EventKind(Severity.FAILURE, "nothing was committed or trained for a long time"),
    "rollout_retried": EventKind(Severity.FAILURE, "a group failed and was retried"),
    "prompt_dropped": EventKind(Severity.FAILURE, "a prompt was dropped after its last attempt"),
    "step_replayed": EventKind(Severity.FAILURE, "a trainer pass failed and the step was repeated"),
    "train_microbatch_failed": EventKind(Severity.FAILURE, "a chunk could not be trained"),
    "step_not_dropped": EventKind(Severity.FAILURE, "the trainer could not discard its open step after an error"),
    "nonfinite_step_skipped": EventKind(Severity.FAILURE, "loss or gradient was not finite; the update was skipped"),
    "step_skipped": EventKind(Severity.FAILURE, "a step had no groups"),
    "engine_out_of_service": EventKind(Severity.FAILURE, "an engine did not load new weights"),
    "engine_lost": EventKind(Severity.FAILURE, "an engine rank died; its requests go on elsewhere, or wait"),
    "engine_not_replaced": EventKind(Severity.FAILURE, "an engine rank that died could not be replaced"),
    "weights_not_published": EventKind(Severity.FAILURE, "no engine loaded the last weights before the run ended"),
    "left_behind": EventKind(Severity.FAILURE, "parts of the run did not stop when it ended"),
    "eval_failed": EventKind(Severity.FAILURE, "a response to a held-out prompt could not be scored"),
    "samples_not_kept": EventKind(Severity.FAILURE, "responses of a step are missing from samples.jsonl"),
    "reward_log_failed": EventKind(
        Severity.FAILURE, "the output of reward functions could not be written to rewards.log"
    ),
    "report_failed": EventKind(Severity.FAILURE, "report.html could not be written"),
    "logger_failed": EventKind(
        Severity.FAILURE, "a logger raised or did not close in time; it gets no further records"
    ),
    "logger_behind": EventKind(Severity.FAILURE, "a logger could not keep up and started to lose records"),
    "logger_gaps": EventKind(Severity.FAILURE, "a logger lost records; metrics.jsonl has them"),
    # Not another failure: attempts, prompts and responses that failed for this cause are counted separately.
    "environment_failed": EventKind(
        Severity.NOTABLE,
        "a reward or environment failed for a new reason; with traceback, prompt and response",
    ),
    "engine_replaced": EventKind(
        Severity.NOTABLE, "an engine rank that died is back, with the weights that are served"
    ),
    "row_worker_restarted": EventKind(
        Severity.NOTABLE,
        "the process that reads and writes rows for the controller died and was started again",
    ),
    "engine_joined": EventKind(Severity.NOTABLE, "an engine rank was added"),
    "engine_left": EventKind(Severity.NOTABLE, "an engine rank was removed; its requests go on elsewhere"),
    "waiting_for_engines": EventKind(
        Severity.NOTABLE, "requests waited for a long time because no engine rank served; one may come back"
    ),
    "prompt_overlong": EventKind(
        Severity.NOTABLE, "a prompt left no room for a response and was skipped (data.overlong: drop)"
    ),
    "prompt_truncated": EventKind(
        Severity.NOTABLE, "a prompt was too long; only its last tokens were kept (data.overlong: truncate_left)"
    ),
    "warning": EventKind(Severity.NOTABLE, "a setting has an effect you may not expect"),
    "display_lost": EventKind(Severity.NOTABLE, "progress could no longer be shown; the run continued without it"),
    "reward_in_process": EventKind(
        Severity.NOTABLE, "a reward function runs in the run's own process, where nothing can stop it"
    ),
    "gradients_cut": EventKind(
        Severity.NOTABLE,
        "for several steps, clipping or the correction removed the gradient of almost all tokens of a kind",
    ),
    "partial_step_dropped": EventKind(Severity.NOTABLE, "the data ended in the middle of a step (data.partial_step)"),
    "settings_changed": EventKind(Severity.NOTABLE, "the run resumed with settings that differ from its checkpoint's"),
    "checkpoints_set_aside": EventKind(
        Severity.NOTABLE, "checkpoints of later steps, or half-deleted ones, were renamed when the run resumed"
    ),
    "old_run_moved": EventKind(Severity.NOTABLE, "an older run in the folder was moved aside (--from-scratch)"),
    "early_stop": EventKind(Severity.NOTABLE, "a metric ended the run (training.early_stop)"),
    "group_evicted": EventKind(
        Severity.WASTE, "a group became too stale in the buffer; its prompt was dispatched again"
    ),
    "group_aborted": EventKind(
        Severity.WASTE, "a group became too stale during generation; its prompt was dispatched again"
    ),
    "group_filtered": EventKind(Severity.CHOSEN, "all rewards of a group were the same; another prompt took its place"),
    "run_started": EventKind(Severity.ROUTINE, "the run started"),
    "run_resumed": EventKind(Severity.ROUTINE, "the run resumed from a checkpoint"),
    "logger_started": EventKind(Severity.ROUTINE, "a logger is ready"),
    "weights_published": EventKind(Severity.ROUTINE, "the engines serve new weights"),
    "checkpoint_proved": EventKind(Severity.ROUTINE, "a test checkpoint was written, read back and removed"),
    "checkpoint_saved": EventKind(Severity.ROUTINE, "a checkpoint is complete"),
    "run_ended": EventKind(Severity.ROUTINE, "the run ended"),
}
"""By name. `docs/metrics.md` names the same ones."""


def severity_of(event: str) -> Severity:
    """How much an event matters; an unknown one is worth a look."""
    kind = EVENT_KINDS.get(event)
    return kind.severity if kind is not None else Severity.NOTABLE


def meaning_of(event: str) -> str | None:
    """What an event means; None if that is unknown."""
    kind = EVENT_KINDS.get(event)
    return kind.meaning if kind is not None else None

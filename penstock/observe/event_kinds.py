"""Every event a run can write: how much it matters to a person, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How much an event matters."""

    FAILURE = "failure"
    """Something went wrong, or something that should have been written is missing."""
    NOTABLE = "notable"
    """Nothing is wrong, but a person wants to know; also what this version does not know."""
    WASTE = "waste"
    """No failure, but a group was generated for nothing."""
    CHOSEN = "chosen"
    """The algorithm at work: a group was left out of training because the settings say so."""
    ROUTINE = "routine"
    """What every run has."""


@dataclass(frozen=True)
class EventKind:
    """What is known of all events of one name."""

    severity: Severity
    meaning: str


EVENT_KINDS: dict[str, EventKind] = {
    "run_failed": EventKind(Severity.FAILURE, "the run ended with an error"),
    "stalled": EventKind(Severity.FAILURE, "nothing was committed or trained for a long time"),
    "rollout_retried": EventKind(Severity.FAILURE, "a group failed and was tried again"),
    "prompt_dropped": EventKind(Severity.FAILURE, "a prompt was given up"),
    "step_replayed": EventKind(Severity.FAILURE, "a pass of the trainer failed and the step was done again"),
    "train_microbatch_failed": EventKind(Severity.FAILURE, "a chunk could not be trained"),
    "step_not_dropped": EventKind(Severity.FAILURE, "after an error, the trainer could not drop its open step either"),
    "nonfinite_step_skipped": EventKind(Severity.FAILURE, "loss or gradient was not finite; the step changed nothing"),
    "step_skipped": EventKind(Severity.FAILURE, "a step had no groups"),
    "engine_out_of_service": EventKind(Severity.FAILURE, "an engine did not take new weights"),
    "weights_not_published": EventKind(Severity.FAILURE, "no engine took new weights before the run ended"),
    "left_behind": EventKind(Severity.FAILURE, "parts that did not come to an end when the run did"),
    "eval_failed": EventKind(Severity.FAILURE, "a response to a held-out prompt could not be scored"),
    "samples_not_kept": EventKind(Severity.FAILURE, "responses of a step are missing in samples.jsonl"),
    "reward_log_failed": EventKind(Severity.FAILURE, "what rewards print cannot be kept in rewards.log"),
    "report_failed": EventKind(Severity.FAILURE, "report.html could not be written"),
    "logger_failed": EventKind(Severity.FAILURE, "a logger raised, or did not end in time; it has no more records"),
    "logger_behind": EventKind(Severity.FAILURE, "a logger did not keep up and began to lose records"),
    "logger_gaps": EventKind(Severity.FAILURE, "records that a logger lost; metrics.jsonl has them"),
    "display_lost": EventKind(Severity.NOTABLE, "progress could not be shown any more; the run went on without"),
    "reward_in_process": EventKind(
        Severity.NOTABLE, "a reward function runs in the run's own process, where nothing can stop it"
    ),
    "gradients_cut": EventKind(
        Severity.NOTABLE, "for several steps, a clip or a correction left almost nothing of a kind of token to train"
    ),
    "partial_step_dropped": EventKind(Severity.NOTABLE, "the data ended in the middle of a step (data.partial_step)"),
    "settings_changed": EventKind(Severity.NOTABLE, "the run went on with other settings than its checkpoint's"),
    "checkpoints_set_aside": EventKind(
        Severity.NOTABLE, "folders of later steps, or half-deleted ones, were renamed when the run went on"
    ),
    "old_run_moved": EventKind(Severity.NOTABLE, "an older run in the folder was moved aside (--from-scratch)"),
    "early_stop": EventKind(Severity.NOTABLE, "the run ended by a metric (training.early_stop)"),
    "group_evicted": EventKind(Severity.WASTE, "a group became too stale in the buffer; its prompt went round again"),
    "group_aborted": EventKind(
        Severity.WASTE, "a group became too stale while it was generated; its prompt went round again"
    ),
    "group_filtered": EventKind(Severity.CHOSEN, "a group's rewards had no spread; another prompt took its place"),
    "run_started": EventKind(Severity.ROUTINE, "the run began"),
    "run_resumed": EventKind(Severity.ROUTINE, "the run went on from a checkpoint"),
    "logger_started": EventKind(Severity.ROUTINE, "a logger is ready"),
    "weights_published": EventKind(Severity.ROUTINE, "the engines serve new weights"),
    "checkpoint_proved": EventKind(Severity.ROUTINE, "a checkpoint was written, read back and removed, for trial"),
    "checkpoint_saved": EventKind(Severity.ROUTINE, "a checkpoint is complete"),
    "run_ended": EventKind(Severity.ROUTINE, "the run ended"),
}
"""By name. `docs/metrics.md` names the same ones."""


def severity_of(event: str) -> Severity:
    """How much an event matters; one that is not known is worth a look."""
    kind = EVENT_KINDS.get(event)
    return kind.severity if kind is not None else Severity.NOTABLE


def meaning_of(event: str) -> str | None:
    """What an event means; None where that is not known."""
    kind = EVENT_KINDS.get(event)
    return kind.meaning if kind is not None else None

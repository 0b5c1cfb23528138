"""What the run's prompts show: their lengths, answers and repetitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from penstock.rollout.environments.base import Split
from penstock.rollout.prompts import Prompt
from penstock.run.plan import prompt_room
from penstock.run.prompt_lengths import measure
from penstock.run.verify.findings import Check, Finding, Status
from penstock.run.verify.subject import Subject

_MOST = 20_000
"""The most prompts of each split to inspect; the figures report the actual number."""

PROMPTS = Check(
    "prompts",
    "prompts",
    (
        "train_prompts",
        "train_overlong",
        "train_longest",
        "cramped",
        "eval_prompts",
        "eval_overlong",
        "eval_longest",
        "empty_answers",
        "repeated",
    ),
    "data.overlong decides whether a prompt that leaves no room for a response ends the run, is skipped or loses its "
    "beginning; a larger rollout.engine.max_model_len makes room. Comparing with an empty answer gives no useful "
    "reward.",
)


async def check_prompts(subject: Subject) -> Finding:
    """No prompt is too long, or lacks the answer that others have."""
    config, serving = subject.config, subject.serving
    room, longest = prompt_room(config), config.rollout.sampling.max_new_tokens
    training, held_out = (
        list(islice(serving.environment.prompts(split), _MOST)) for split in (Split.TRAIN, Split.EVAL)
    )
    train = measure(training, serving.tokenizer, room, longest, all_of_them=True)
    other = measure(held_out, serving.tokenizer, room, config.eval.max_new_tokens or longest, all_of_them=True)
    figures = {
        "train_prompts": train.prompts,
        "train_overlong": train.overlong,
        "train_longest": train.longest,
        "cramped": train.cramped + other.cramped,
        "eval_prompts": other.prompts,
        "eval_overlong": other.overlong,
        "eval_longest": other.longest,
        "empty_answers": _empty_answers(training) + _empty_answers(held_out),
        "repeated": sum(count - 1 for count in Counter(str(prompt.content) for prompt in training).values()),
    }
    overlong = train.overlong + other.overlong
    problem = " ".join(_problems(figures, config.data.overlong, overlong))
    status = Status.FAIL if overlong and config.data.overlong == "error" else Status.WARN if problem else Status.PASS
    most = max(train.longest, other.longest)
    shown = f"{train.prompts:,} and {other.prompts:,} held-out, the longest with {most:,} tokens"
    shown += f"; {overlong:,} too long" if overlong else ""
    repeated = figures["repeated"]
    duplicates = "prompt is a duplicate" if repeated == 1 else "prompts are duplicates"
    notes = (f"{repeated:,} training {duplicates}",) if repeated else ()
    return Finding(status, shown, figures, bar=f"below {room.context:,} tokens", problem=problem, notes=notes)


def _problems(figures: dict[str, int], mode: str, overlong: int) -> list[str]:
    """What is worth knowing, in words."""
    found = []
    if overlong:
        total = figures["train_prompts"] + figures["eval_prompts"]
        leave = "leaves" if overlong == 1 else "leave"
        found.append(f"{overlong:,} of {total:,} prompts {leave} no room for a response (data.overlong: {mode}).")
    if figures["cramped"]:
        leave, their = ("prompt leaves", "its") if figures["cramped"] == 1 else ("prompts leave", "their")
        found.append(
            f"{figures['cramped']:,} {leave} less room than rollout.sampling.max_new_tokens; {their} responses are "
            "truncated earlier."
        )
    if figures["empty_answers"]:
        have = "prompt has" if figures["empty_answers"] == 1 else "prompts have"
        found.append(f"{figures['empty_answers']:,} {have} an empty answer; others do not.")
    return found


def _empty_answers(prompts: Sequence[Prompt]) -> int:
    """Prompts without an answer, if others have one; data without any answers needs none."""
    empty = sum(
        prompt.answer is None or (isinstance(prompt.answer, str) and not prompt.answer.strip()) for prompt in prompts
    )
    return empty if any(prompt.answer is not None for prompt in prompts) else 0

"""How long prompts are, in tokens, and whether any leaves no room for a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.models import EvalConfig, RunConfig
from penstock.errors import PenstockError, SetupError
from penstock.rollout.environments.base import Environment, Split
from penstock.rollout.handle import Tokenizer
from penstock.rollout.prompt_room import PromptRoom
from penstock.rollout.prompts import Prompt
from penstock.run.plan import prompt_room

_MOST_ENCODED = 50_000
"""Prompts that are encoded before a run; the rest are found when they are dispatched."""
_PER_PROMPT, _PER_MESSAGE = 256, 32
"""Tokens that a chat template may add; prompts too far below the limit for any template to matter are not encoded."""


@dataclass(frozen=True)
class Lengths:
    """Prompts by their length; those that cannot be encoded count only in `prompts`."""

    prompts: int
    overlong: int = 0
    """They leave no room for a single new token."""
    cramped: int = 0
    """They leave room, but less than for the longest response."""
    longest: int = 0
    first: str | None = None
    """Id of the first overlong prompt."""


def measure(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, room: PromptRoom, max_new_tokens: int, *, all_of_them: bool = False
) -> Lengths:
    """Encode the prompts that may be too long, or `all_of_them`, as the model would see them."""
    overlong: list[str] = []
    cramped = longest = encoded = 0
    for prompt in prompts:
        if not all_of_them and (encoded >= _MOST_ENCODED or _surely_fits(prompt, room)):
            continue
        encoded += 1
        try:
            tokens = len(tokenizer.encode_prompt(prompt.content))
        except PenstockError:  # a template that refuses this chat: its rollout will say so
            continue
        longest = max(longest, tokens)
        if room.is_overlong(tokens):
            overlong.append(prompt.prompt_id)
        elif tokens + max_new_tokens > room.context:
            cramped += 1
    return Lengths(len(prompts), len(overlong), cramped, longest, overlong[0] if overlong else None)


def _surely_fits(prompt: Prompt, room: PromptRoom) -> bool:
    """A token is at least a byte of text, or one that the template adds."""
    added = _PER_PROMPT + _PER_MESSAGE * len(prompt.messages or ())
    return len(prompt.text) * 4 + added < room.context or len(prompt.text.encode()) + added < room.context


def refuse_overlong(config: RunConfig, environment: Environment, tokenizer: Tokenizer, *, trains: bool = True) -> None:
    """Raise `SetupError` if prompts of the run are too long and `data.overlong` is `error`, saying how many."""
    if config.data.overlong != "error":
        return
    room, found = prompt_room(config), []
    for split in Split:
        if not (trains if split is Split.TRAIN else _is_evaluated(config.eval) or not trains):
            continue
        lengths = measure(environment.prompts(split), tokenizer, room, config.rollout.sampling.max_new_tokens)
        if lengths.overlong:
            kind = "training" if split is Split.TRAIN else "held-out"
            found.append(
                f"{lengths.overlong:,} of {lengths.prompts:,} {kind} prompts (the longest has {lengths.longest:,} "
                f"tokens, the first is {lengths.first!r})"
            )
    if found:
        verb = "leaves" if found[0].startswith("1 of ") and len(found) == 1 else "leave"
        raise SetupError(
            f"data.overlong: {' and '.join(found)} {verb} no room for a response in rollout.engine.max_model_len = "
            f"{room.context}; raise it, or set data.overlong to drop or truncate_left"
        )


def _is_evaluated(config: EvalConfig) -> bool:
    return config.at_start or config.at_end or config.every_steps is not None

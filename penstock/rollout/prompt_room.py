"""Room for prompts in the engine's context: which are too long, and how much of a truncated one remains."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class PromptRoom:
    """What becomes of a prompt that leaves no room for a single new token (`data.overlong`).

    Example: a context of 10 and 4 new tokens. A prompt of 9 tokens is unchanged, since one token fits after it. One of
    10 is overlong: with `truncates`, its last 6 tokens are kept.
    """

    context: int
    """`rollout.engine.max_model_len`."""
    truncates: bool = False

    def is_overlong(self, tokens: int) -> bool:
        """Whether a prompt of this many tokens leaves no room for a response."""
        return tokens >= self.context

    def fit(self, token_ids: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
        """The prompt, cut on the left to leave room for a whole response if it is too long and `truncates` is set."""
        if not self.truncates or not self.is_overlong(len(token_ids)):
            return token_ids
        return token_ids[-max(1, self.context - max_new_tokens) :]

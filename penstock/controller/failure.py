"""The failure policy, as pure functions: whose fault an error is, and whether to try again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.config.rollout import FailureConfig
from penstock.errors import FailureKind

_INFRA_BUILTINS = (TimeoutError, ConnectionError, EOFError, MemoryError)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, outermost first; each once, even where the chain bites its tail."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def classify(error: BaseException) -> FailureKind:
    """The deepest cause that knows decides; an error that nothing is known of counts as the data's fault."""
    kind = FailureKind.DATA
    for link in causes(error):
        known = getattr(link, "failure_kind", None)
        if isinstance(known, FailureKind):
            kind = known
        elif isinstance(link, _INFRA_BUILTINS):
            kind = FailureKind.INFRA
    return kind


def describe(error: BaseException) -> str:
    """The chain of causes on one line."""
    return " <- ".join(f"{type(link).__name__}: {link}" for link in causes(error))


@dataclass(frozen=True)
class Attempts:
    """How often a prompt has failed so far, by kind."""

    infra: int = 0
    data: int = 0

    def after(self, kind: FailureKind) -> Attempts:
        """One failure more."""
        if kind is FailureKind.INFRA:
            return replace(self, infra=self.infra + 1)
        return replace(self, data=self.data + 1)


def retry_delay(attempts: Attempts, kind: FailureKind, config: FailureConfig) -> float | None:
    """Seconds to wait before the next attempt, or None when the prompt is to be given up.

    `attempts` counts the failure at hand. Example: with `data_attempts = 2` the first DATA failure gives a delay, the
    second gives None.
    """
    failed, allowed = (
        (attempts.infra, config.infra_attempts) if kind is FailureKind.INFRA else (attempts.data, config.data_attempts)
    )
    if failed >= allowed:
        return None
    return min(config.backoff_seconds * 2.0 ** (failed - 1), config.backoff_max_seconds)

"""The failure policy, as pure functions: whose fault an error is, and whether to try again."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, replace

from penstock.config.sections.rollout import FailureConfig
from penstock.errors import FailureKind
from penstock.text import cut, named_error

_INFRA_BUILTINS = (TimeoutError, ConnectionError, EOFError, MemoryError, BrokenExecutor, socket.gaierror)
"""Timeouts, lost peers and workers, names that cannot be looked up, out of memory."""
_INFRA_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE),  # the disk
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS),  # the machine's limits
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),  # the network
}
"""Other `OSError`s, a missing file for example, are the data's fault like any error."""
_LONGEST = 8_000
"""How many characters of a chain of causes are kept."""
_DEEPEST = 200
"""How deep in the chain of causes `classify` looks."""


def _leads(error: BaseException) -> Iterator[BaseException]:
    """What led to an error directly: the members of a group, and its cause, else what was being handled."""
    if isinstance(error, BaseExceptionGroup):
        yield from error.exceptions
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield cause


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, outermost first; each once, even if the chain loops back on itself."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        link = todo.pop()
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += reversed(list(_leads(link)))


def classify(error: BaseException) -> FailureKind:
    """The deepest cause of a known kind decides; an unknown error counts as the data's fault.

    Among several simultaneous errors, one that is the machinery's fault is enough: a retry without it shows what the
    others really are.
    """
    return _known_kind(error, frozenset()) or FailureKind.DATA


def _known_kind(error: BaseException, above: frozenset[int]) -> FailureKind | None:
    above |= {id(error)}
    leads = _leads(error) if len(above) <= _DEEPEST else ()
    below = {_known_kind(lead, above) for lead in leads if id(lead) not in above}
    for kind in (FailureKind.INFRA, FailureKind.DATA):
        if kind in below:
            return kind
    known = getattr(error, "failure_kind", None)
    if isinstance(known, FailureKind):
        return known
    machinery = isinstance(error, _INFRA_BUILTINS) or (isinstance(error, OSError) and error.errno in _INFRA_ERRNOS)
    return FailureKind.INFRA if machinery else None


def describe(error: BaseException) -> str:
    """The chain of causes as text that any file accepts; a very long one is cut, and says how much is missing."""
    return cut(" <- ".join(map(named_error, causes(error))), _LONGEST)


@dataclass(frozen=True)
class Attempts:
    """How often a prompt has failed so far, by kind."""

    infra: int = 0
    data: int = 0

    def after(self, kind: FailureKind) -> Attempts:
        """The counts after one more failure."""
        if kind is FailureKind.INFRA:
            return replace(self, infra=self.infra + 1)
        return replace(self, data=self.data + 1)


def retry_delay(attempts: Attempts, kind: FailureKind, config: FailureConfig) -> float | None:
    """Seconds to wait before the next attempt, or None if the prompt should be dropped.

    `attempts` includes the current failure. Example: with `data_attempts = 2` the first DATA failure gives a delay, the
    second gives None.
    """
    failed, allowed = (
        (attempts.infra, config.infra_attempts) if kind is FailureKind.INFRA else (attempts.data, config.data_attempts)
    )
    if failed >= allowed:
        return None
    return min(config.backoff_seconds * 2.0 ** (failed - 1), config.backoff_max_seconds)

"""A trainer that is lost at a chosen call, as one is whose process was killed: every later call fails as well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.errors import TrainerLost
from penstock.run import build_trainer
from penstock.training.interface import Trainer
from penstock.training.workers.local import LocalTrainer

MakesError = Callable[[], Exception | Awaitable[Exception]]


@contextmanager
def losing_trainers(
    patch: pytest.MonkeyPatch,
    *plan: tuple[str, int],
    error: MakesError | None = None,
    when_built: Mapping[int, Callable[[], None]] | None = None,
) -> Iterator[list[Trainer]]:
    """The n-th trainer of a run is lost in the `count`-th call of a method, by `plan`; those after it are not.

    `error` makes what its calls raise; `when_built` is called when the n-th trainer is built. Yields the trainers that
    were built.
    """
    built: list[Trainer] = []
    told = when_built or {}

    class LosingTrainer(LocalTrainer):
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> LocalTrainer:
            trainer = super().from_pretrained(*args, **kwargs)
            if len(built) < len(plan):
                lose_at(trainer, *plan[len(built)], error or lost)
            built.append(trainer)
            told.get(len(built) - 1, lambda: None)()
            return trainer

    patch.setitem(build_trainer._TRAINERS, "local", LosingTrainer.from_pretrained)
    yield built


def lost() -> Exception:
    """What every call of a trainer raises whose process is gone."""
    return TrainerLost("the trainer's process was killed by SIGKILL")


CALLS = (
    "begin_train_step",
    "train_microbatch",
    "finish_train_step",
    "abort_train_step",
    "compute_logprobs",
    "prepare",
    "publish_weights",
    "snapshot",
    "load_checkpoint",
)


def lose_at(trainer: Trainer, method: str, count: int, error: MakesError) -> None:
    """From the `count`-th call of `method` on, every call fails."""
    calls = iter(range(1, 10**9))
    gone = asyncio.Event()

    def failing(name: str) -> Callable[..., Any]:
        original = getattr(trainer, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if name == method and next(calls) == count:
                gone.set()
            if gone.is_set():
                raised = error()
                raise await raised if isinstance(raised, Awaitable) else raised
            return await original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(trainer, name, failing(name))

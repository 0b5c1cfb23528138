"""The life of a split train step, without the model: which call is legal when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum

from penstock.errors import PenstockError, StepStateError


class StepState(Enum):
    """Where the current step stands."""

    CLOSED = "closed"
    """No step: begin is legal."""
    OPEN = "open"
    """Gradients accumulate: microbatch, finish and abort are legal."""
    FAILED = "failed"
    """A microbatch raised, so the accumulated gradients are useless: only abort is legal."""
    BROKEN = "broken"
    """The optimizer failed half-way, so the weights are unusable: only loading a checkpoint helps."""


class OptimizerStepError(PenstockError):
    """The optimizer raised while it changed weights; they must be rebuilt from the last checkpoint."""


class StepMachine:
    """The state of one trainer's step; knows ids and transitions, but no gradients.

    Invariants: at most one step is open; a call that the state does not allow raises `StepStateError` and changes
    nothing; `step_id` is set exactly while the state is not CLOSED.

    Example:

        machine.begin(7)                    # CLOSED -> OPEN
        with machine.microbatch(7): ...     # stays OPEN; -> FAILED if the block raises
        machine.begin(8)                    # StepStateError; step 7 is still open
        with machine.finishing(7) as commit:
            ...                             # reduce, norm, vote: an error here -> FAILED, still abortable
            with commit(): ...              # optimizer step: an error here -> BROKEN
                                            # OPEN -> CLOSED as the block ends
        machine.abort(7)                    # CLOSED: no-op, returns False
    """

    def __init__(self) -> None:
        self._state = StepState.CLOSED
        self._step_id: int | None = None

    @property
    def state(self) -> StepState:
        """Where the step stands."""
        return self._state

    @property
    def step_id(self) -> int | None:
        """The step that is open or failed."""
        return self._step_id

    def begin(self, step_id: int) -> None:
        """Open a step."""
        self.require_closed(f"begin_train_step({step_id})")
        self._state, self._step_id = StepState.OPEN, step_id

    @contextmanager
    def microbatch(self, step_id: int) -> Iterator[None]:
        """Around one microbatch's work; an error marks the step failed and propagates to the caller."""
        self._require_open(f"train_microbatch({step_id})", step_id)
        try:
            yield
        except BaseException:
            self._state = StepState.FAILED
            raise

    @contextmanager
    def finishing(self, step_id: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Around the end of a step. The yielded function guards the part that changes weights."""
        self._require_open(f"finish_train_step({step_id})", step_id)
        try:
            yield self._commit
        except BaseException:
            if self._state is StepState.OPEN:
                self._state = StepState.FAILED
            raise
        self._close()

    def abort(self, step_id: int) -> bool:
        """Close the step without finishing it; True if there was one to close."""
        if self._state in (StepState.CLOSED, StepState.BROKEN):
            return False
        if step_id != self._step_id:
            raise StepStateError(f"abort_train_step({step_id}): the open step is {self._step_id}; abort that one")
        self._close()
        return True

    def require_closed(self, call: str) -> None:
        """Raise unless no step is under way."""
        if self._state is StepState.BROKEN:
            raise StepStateError(f"{call}: the optimizer failed in step {self._step_id}; load a checkpoint first")
        if self._state is not StepState.CLOSED:
            raise StepStateError(f"{call}: step {self._step_id} is {self._state.value}; finish or abort it first")

    def reset(self) -> None:
        """Forget any step, after a checkpoint has replaced weights and optimizer."""
        self._close()

    @contextmanager
    def _commit(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._state = StepState.BROKEN
            raise OptimizerStepError(
                f"step {(self._step_id or 0) + 1}: the optimizer failed while it changed weights ({error!r}); some may "
                "be new and some old, so the trainer must be rebuilt from the last checkpoint"
            ) from error

    def _require_open(self, call: str, step_id: int) -> None:
        if self._state is StepState.CLOSED:
            raise StepStateError(f"{call}: no step is open; call begin_train_step first")
        if step_id != self._step_id:
            raise StepStateError(f"{call}: the open step is {self._step_id}")
        if self._state is StepState.FAILED:
            raise StepStateError(f"{call}: a microbatch of this step failed; only abort_train_step is legal")
        if self._state is StepState.BROKEN:
            raise StepStateError(f"{call}: the optimizer failed in this step; load a checkpoint first")

    def _close(self) -> None:
        self._state, self._step_id = StepState.CLOSED, None

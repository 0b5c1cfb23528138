from __future__ import annotations

import pytest

from penstock.errors import StepStateError
from penstock.training.step import OptimizerStepError, StepMachine, StepState


def opened(step_id: int = 3) -> StepMachine:
    machine = StepMachine()
    machine.begin(step_id)
    return machine


def failed(step_id: int = 3) -> StepMachine:
    machine = opened(step_id)
    with pytest.raises(ZeroDivisionError), machine.microbatch(step_id):
        raise ZeroDivisionError
    return machine


def broken(step_id: int = 3) -> StepMachine:
    machine = opened(step_id)
    with pytest.raises(OptimizerStepError, match="last checkpoint"), machine.finishing(step_id) as commit, commit():
        raise ZeroDivisionError
    return machine


def test_a_step_opens_takes_microbatches_and_closes() -> None:
    machine = opened()
    for _ in range(2):
        with machine.microbatch(3):
            assert machine.state is StepState.OPEN
    with machine.finishing(3) as commit, commit():
        pass
    assert machine.state is StepState.CLOSED
    assert machine.step_id is None


def test_begin_while_open_leaves_the_open_step_unharmed() -> None:
    machine = opened()
    with pytest.raises(StepStateError, match="step 3 is open"):
        machine.begin(4)
    assert (machine.state, machine.step_id) == (StepState.OPEN, 3)
    with machine.microbatch(3):
        pass


@pytest.mark.parametrize("call", ["microbatch", "finishing"])
def test_calls_without_an_open_step_are_refused(call: str) -> None:
    machine = StepMachine()
    with pytest.raises(StepStateError, match="no step is open"), getattr(machine, call)(1):
        pytest.fail("the block must not run")
    assert machine.state is StepState.CLOSED


@pytest.mark.parametrize("call", ["microbatch", "finishing"])
def test_calls_for_another_step_are_refused(call: str) -> None:
    machine = opened()
    with pytest.raises(StepStateError, match="the open step is 3"), getattr(machine, call)(4):
        pytest.fail("the block must not run")
    assert machine.state is StepState.OPEN


def test_after_a_failed_microbatch_only_abort_is_legal() -> None:
    machine = failed()
    assert machine.state is StepState.FAILED
    with pytest.raises(StepStateError, match="only abort"), machine.microbatch(3):
        pass
    with pytest.raises(StepStateError, match="only abort"), machine.finishing(3):
        pass
    with pytest.raises(StepStateError, match="step 3 is failed"):
        machine.begin(4)
    assert machine.abort(3)
    machine.begin(4)
    assert machine.state is StepState.OPEN


def test_abort_is_idempotent_and_a_no_op_without_a_step() -> None:
    machine = opened()
    assert machine.abort(3)
    assert not machine.abort(3)
    assert not StepMachine().abort(1)


def test_abort_of_another_step_is_refused() -> None:
    machine = opened()
    with pytest.raises(StepStateError, match="the open step is 3"):
        machine.abort(2)
    assert machine.state is StepState.OPEN


def test_an_error_before_the_weights_change_can_be_aborted() -> None:
    machine = opened()
    with pytest.raises(ZeroDivisionError), machine.finishing(3):
        raise ZeroDivisionError
    assert machine.state is StepState.FAILED
    assert machine.abort(3)


def test_an_error_in_the_optimizer_needs_a_checkpoint() -> None:
    machine = broken()
    assert machine.state is StepState.BROKEN
    assert not machine.abort(3)
    with pytest.raises(StepStateError, match="load a checkpoint"):
        machine.begin(4)
    machine.reset()
    machine.begin(4)
    assert machine.state is StepState.OPEN

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.controller.bookkeeping.ledger import Ledger, PromptEnd
from penstock.errors import LedgerError
from penstock.rollout.prompts import Prompt, PromptStream, PromptVisit


def stream(prompts: int = 5, epochs: int = 2, seed: int = 0) -> PromptStream:
    return PromptStream([Prompt(f"p{i}", str(i)) for i in range(prompts)], epochs=epochs, shuffle=True, seed=seed)


def take(ledger: Ledger) -> PromptVisit:
    visit = ledger.take()
    assert visit is not None
    return visit


def test_visits_come_in_the_streams_order_and_then_no_more() -> None:
    ledger = Ledger(stream())
    assert [take(ledger) for _ in range(10)] == list(stream())
    assert ledger.take() is None
    assert ledger.cursor == 10


@pytest.mark.parametrize("how", list(PromptEnd))
def test_a_visit_ends_once(how: PromptEnd) -> None:
    ledger = Ledger(stream())
    visit = take(ledger)
    ledger.end(visit, how, 1)
    with pytest.raises(LedgerError, match=f"it is {how.value} already"):
        ledger.end(visit, PromptEnd.TRAINED, 2)
    assert ledger.count(how) == 1


def test_a_visit_that_was_not_handed_out_cannot_end() -> None:
    with pytest.raises(LedgerError, match="not handed out"):
        Ledger(stream()).end(stream()[0], PromptEnd.TRAINED, 1)


def test_the_same_prompt_in_another_epoch_is_another_visit() -> None:
    ledger = Ledger(stream(prompts=1, epochs=2))
    first, second = take(ledger), take(ledger)
    ledger.end(first, PromptEnd.TRAINED, 1)
    assert [visit.key for visit in ledger.open_visits()] == [second.key]


def test_ends_are_recorded_as_they_come() -> None:
    found: list[object] = []
    ledger = Ledger(stream(), found.append)
    visit = take(ledger)
    ledger.end(visit, PromptEnd.FILTERED, 3)
    assert found == [{"epoch": 0, "prompt_id": visit.prompt.prompt_id, "end": "filtered", "step": 3}]


@given(st.data())
def test_any_number_of_restarts_leaves_every_visit_with_one_end(data: st.DataObject) -> None:
    """The ledger is saved now and then; a restart goes back to the last save, and open visits are done again."""
    prompts, epochs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    saved: tuple[bytes, dict[int, int]] = (b"", {})
    for _ in range(data.draw(st.integers(0, 4))):
        ledger = Ledger(stream(prompts, epochs))
        ledger.restore(*saved)
        open_visits = list(ledger.open_visits())
        for _ in range(data.draw(st.integers(0, 8))):
            action = data.draw(st.sampled_from(["take", "end", "save"]))
            if action == "take" and (visit := ledger.take()) is not None:
                open_visits.append(visit)
            elif action == "end" and open_visits:
                ledger.end(open_visits.pop(data.draw(st.integers(0, len(open_visits) - 1))), PromptEnd.TRAINED, 1)
            elif action == "save":
                saved = ledger.state()
    ledger = Ledger(stream(prompts, epochs))
    ledger.restore(*saved)
    done = Counter({place: 1 for place, end in enumerate(saved[0]) if end})
    for visit in ledger.open_visits():
        ledger.end(visit, PromptEnd.TRAINED, 1)
        done[visit.position] += 1
    while (visit := ledger.take()) is not None:
        ledger.end(visit, PromptEnd.TRAINED, 1)
        done[visit.position] += 1
    assert done == Counter(range(prompts * epochs))


def test_a_ledger_knows_how_often_a_prompt_went_round() -> None:
    from dataclasses import replace

    ledger = Ledger(stream())
    visit = replace(take(ledger), redispatches=2)
    ledger.dispatched_again(visit)
    again = Ledger(stream())
    again.restore(*ledger.state())
    assert [open_visit.redispatches for open_visit in again.open_visits()] == [2]


def test_a_ledger_of_more_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(LedgerError, match=r"data\.epochs or the data itself is smaller"):
        Ledger(stream(prompts=2, epochs=1)).restore(b"\x01\x01\x01", {})


def test_the_digest_names_prompts_and_order_but_not_epochs() -> None:
    assert stream(epochs=1).digest == stream(epochs=3).digest
    assert stream(seed=0).digest != stream(seed=1).digest
    assert stream(prompts=5).digest != stream(prompts=4).digest

"""The group book: ends as phases allow them, written everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.controller.bookkeeping.group_phases import ENDS, NEXT, GroupPhases
from penstock.errors import GroupStateError, RecordError, TooManyDrops
from penstock.observe.group_lives import GroupEnd, GroupPhase
from penstock.rollout.manager import PARTITION
from penstock.rollout.prompts import Prompt, PromptVisit
from tests.support.group_books import PERMITS, Book, at_once


def test_every_phase_and_every_end_is_in_the_tables() -> None:
    assert NEXT.keys() == ENDS.keys() == set(GroupPhase)
    assert set().union(*ENDS.values()) == set(GroupEnd)
    assert set().union(*NEXT.values()) == set(GroupPhase) - {GroupPhase.GENERATING}


VISIT = PromptVisit(0, Prompt("p", "p"))
PATHS = {
    GroupPhase.GENERATING: (),
    GroupPhase.RESTING: (GroupPhase.RESTING,),
    GroupPhase.READY: (GroupPhase.READY,),
    GroupPhase.TRAINING: (GroupPhase.READY, GroupPhase.TRAINING),
}


@pytest.mark.parametrize("phase", GroupPhase)
@pytest.mark.parametrize("how", GroupEnd)
def test_a_group_ends_as_its_phase_allows_and_once(phase: GroupPhase, how: GroupEnd) -> None:
    groups = GroupPhases()
    groups.begin("a", VISIT)
    for step in PATHS[phase]:
        groups.enter("a", step)
    if how not in ENDS[phase]:
        with pytest.raises(GroupStateError, match=f"group a cannot end {how.value}: it is {phase.value}"):
            groups.end("a", how)
        assert groups.phase("a") is phase
        return
    assert groups.end("a", how) is VISIT
    with pytest.raises(GroupStateError, match="group a has ended already"):
        groups.end("a", how)
    assert len(groups) == 0


class TestWhereOneOfThePlacesRaises:
    """An end is written everywhere or nowhere."""

    def test_without_the_ledgers_line_nothing_says_that_the_group_has_ended(self) -> None:
        book = Book()
        slot = book.dispatched()
        book.ledger_fails = True
        with pytest.raises(RecordError, match=r"ledger\.jsonl"):
            book.book.drop(slot, "no luck")
        assert (book.told, book.ends(), book.drops.dropped) == ([], {}, 0)
        assert book.buffer.is_reserved(slot.group_id)
        book.ledger_fails = False
        book.book.drop(slot, "no luck")
        assert book.ends() == {"dropped": 1}

    @pytest.mark.parametrize("end", ["drop", "skip", "filter"])
    def test_an_event_that_cannot_be_written_keeps_no_other_place_from_being_told(self, end: str) -> None:
        book = Book()
        slot = book.dispatched()
        if end == "filter":
            book.committed(slot)
            [slot] = book.selected()
        book.events.fails = True
        calls: dict[str, Callable[[], object]] = {
            "drop": lambda: book.book.drop(slot, "no luck"),
            "skip": lambda: book.book.skip_overlong(slot, "too long"),
            "filter": lambda: at_once(book.book.filter([slot])),
        }
        with pytest.raises(RecordError, match=r"events\.jsonl"):
            calls[end]()
        assert book.ends().total() == len(book.lines) == 1
        assert book.buffer.free_permits == PERMITS
        assert book.buffer.dispatched == book.buffer.returned
        with pytest.raises(GroupStateError):
            book.book.visit(slot.group_id)

    def test_one_of_several_that_cannot_be_written_keeps_no_other_group_from_ending(self) -> None:
        book = Book()
        for _ in range(3):
            book.ready()
        slots = book.selected(3)
        lines = iter([True, False, True])
        record = book.ledger._record
        assert record is not None

        def second_fails(line: Any) -> None:
            if not next(lines):
                raise RecordError("ledger.jsonl: no space left")
            record(line)

        book.ledger._record = second_fails
        with pytest.raises(RecordError):
            book.book.train(slots)
        assert [line["prompt_id"] for line in book.lines] == ["0", "2"]
        assert book.ends() == {"trained": 2}
        assert book.book.visit(slots[1].group_id).prompt.prompt_id == "1"

    def test_evicted_groups_come_back_and_lose_their_rows_even_if_the_events_fail(self) -> None:
        book = Book()
        for _ in range(3):
            book.ready()
        book.buffer.advance(trainer_version=1, step=1)
        book.events.fails = True
        with pytest.raises(RecordError):
            at_once(book.book.evict())
        assert book.ends() == {"evicted": 3}
        assert book.data_plane.count_samples(PARTITION) == 0
        assert [at_once(book.work.next()).prompt.prompt_id for _ in range(4)] == ["0", "1", "2", "3"]


def test_a_drop_beyond_the_budget_is_told_and_leaves_the_prompt_open() -> None:
    book = Book(max_dropped=0)
    slot = book.dispatched()
    with pytest.raises(TooManyDrops, match="no luck"):
        book.book.drop(slot, "no luck")
    assert [name for name, _ in book.told] == ["prompt_dropped"]
    assert (book.lines, book.ends()) == ([], {})
    book.book.end_with_run(slot.group_id)
    assert [visit.prompt.prompt_id for visit in book.ledger.open_visits()] == ["0"]


def test_a_step_that_is_abandoned_after_some_of_its_groups_have_ended_ends_the_others() -> None:
    book = Book()
    for _ in range(3):
        book.ready()
    slots = book.selected(3)
    at_once(book.book.filter(slots[:1]))
    at_once(book.book.abandon(slots))
    assert book.ends() == {"filtered": 1, "abandoned": 2}
    assert book.data_plane.count_samples(PARTITION) == 0
    assert [visit.prompt.prompt_id for visit in book.ledger.open_visits()] == ["1", "2"]

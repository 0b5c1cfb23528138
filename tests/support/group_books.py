"""A real group book on real parts, without pumps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.samplers.windowed import Windowed
from penstock.buffer.slots import Slot
from penstock.config.sections.rollout import FailureConfig
from penstock.controller.bookkeeping.group_book import GroupBook
from penstock.controller.bookkeeping.ledger import Ledger
from penstock.controller.bookkeeping.pump_trace import PumpTrace
from penstock.controller.bookkeeping.work_queue import WorkQueue
from penstock.controller.failures.drops import DropBook
from penstock.controller.parts import Parts
from penstock.data_plane import fields
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import RecordError
from penstock.observe.events import EventLog
from penstock.observe.timeline import Timeline
from penstock.rollout.fleet.fleet import EngineFleet
from penstock.rollout.manager import PARTITION, PushedGroup
from penstock.rollout.prompts import Prompt, PromptStream
from penstock.training.workers.scripted import ScriptedTrainer
from tests.support.trace_checks import KeptTrace

PERMITS, PROMPTS = 4, 40
T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of async work that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


class FragileLog(EventLog):
    """Counts an event and then fails, when told to, as a full disk does."""

    fails = False

    def emit(self, event: str, /, **fields: Any) -> None:
        super().emit(event, **fields)
        if self.fails:
            raise RecordError("events.jsonl: no space left")


@dataclass
class Book:
    """A real book on real parts, and what it wrote where."""

    on_drop: str = "replace"
    max_dropped: int = 1000
    ledger_fails: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    trace: KeptTrace = field(default_factory=KeptTrace)

    def __post_init__(self) -> None:
        stream = PromptStream([Prompt(str(i), str(i)) for i in range(PROMPTS)], epochs=1, shuffle=False, seed=0)
        sampler = Windowed(2, max_staleness=0, over_sampling=True)
        self.buffer = ReplayBuffer(sampler, PERMITS)
        self.data_plane = MemoryDataPlane()
        self.data_plane.register_partition(PARTITION, fields.schema(fields.REWARD))
        self.events = FragileLog()
        self.events.subscribe(lambda name, event: self.told.append((name, dict(event))))
        self.ledger = Ledger(stream, self._record)
        self.work = WorkQueue(self.ledger, self.buffer)
        failure = FailureConfig(max_dropped_prompts=self.max_dropped, on_drop=self.on_drop)  # type: ignore[arg-type]
        self.drops = DropBook(failure, 2)
        engines = EngineFleet()
        timeline = Timeline(self.trace, clock=itertools.count(1.0).__next__)
        parts = Parts(
            stream,
            None,  # type: ignore[arg-type]
            engines,
            ScriptedTrainer(),
            self.buffer,
            self.data_plane,
            self.events,
            timeline,
        )
        self.book = GroupBook(parts, self.ledger, self.work, self.drops, PumpTrace(timeline, self.buffer, engines), 3)

    def _record(self, line: Any) -> None:
        if self.ledger_fails:
            raise RecordError("ledger.jsonl: no space left")
        self.lines.append(dict(line))

    def dispatched(self) -> Slot:
        visit = at_once(self.work.next())
        admission = self.buffer.try_admission()
        assert admission is not None
        return self.book.dispatch(visit, admission)

    def committed(self, slot: Slot) -> None:
        sample = f"{slot.group_id}_g0"
        meta = KVBatchMeta(PARTITION, (sample,), frozenset({"reward"}), (1,))
        self.data_plane.put_samples([sample], {fields.REWARD: torch.zeros(1)}, PARTITION)
        self.book.commit(slot.group_id, PushedGroup(meta, slot.start_version))

    def selected(self, count: int = 1) -> list[Slot]:
        return self.book.select(count)

    def ends(self) -> Counter[str]:
        """Ends on the timeline."""
        return Counter(e["args"]["end"] for e in self.trace.events if e["ph"] == "e" and e["name"] == "group")

    def ready(self) -> Slot:
        slot = self.dispatched()
        self.committed(slot)
        return slot

"""All calls in any order, against a plain model of what they mean, on every adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.data_plane.claims import ClaimWithdrawn, PendingClaim
from penstock.data_plane.client import DataPlaneClient, SampleBatch
from penstock.data_plane.columns import Column, JaggedColumn, ObjectColumn
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import MissingRowError
from tests.data_plane.conftest import new_partition
from tests.data_plane.opened import Opened
from tests.data_plane.support import FIELDS, SCHEMA, meta_of

LONG = 60.0
MAIN, KEPT = 0, 1
samples = st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)
fields = st.lists(st.sampled_from(FIELDS), unique=True)
tasks = st.sampled_from(["scorer", "trainer"])
partitions = st.sampled_from([MAIN, MAIN, KEPT])


@dataclass
class ModelRow:
    """The number that each field of a row was last put with, and its tags."""

    cells: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.cells["tokens"] % 4 if "tokens" in self.cells else 0


@dataclass
class ModelPartition:
    """Rows, oldest first, and for each task the rows that it has not claimed, in the order in which it gets them."""

    rows: dict[str, ModelRow] = field(default_factory=dict)
    free: dict[str, list[str]] = field(default_factory=lambda: {"scorer": [], "trainer": []})

    def row(self, sample: str) -> ModelRow:
        if sample not in self.rows:
            self.rows[sample] = ModelRow()
            for free in self.free.values():
                free.append(sample)
        return self.rows[sample]

    def ready(self, task: str, names: list[str]) -> list[str]:
        return [sample for sample in self.free[task] if set(names) <= self.rows[sample].cells.keys()]

    def has(self, chosen: list[str], names: list[str]) -> bool:
        return all(sample in self.rows and set(names) <= self.rows[sample].cells.keys() for sample in chosen)


@dataclass(eq=False)
class ModelClaim:
    client: DataPlaneClient
    pending: PendingClaim
    where: int
    task: str
    names: list[str]
    count: int


class Calls(RuleBasedStateMachine):
    """Two clients make calls in turn; after each one, what they see is what the model has."""

    def __init__(self, clients: Opened) -> None:
        super().__init__()
        self.clients = (clients.plane, clients.other)
        self.names = (new_partition(), new_partition())
        self.model = (ModelPartition(), ModelPartition())
        self.waiting: list[ModelClaim] = []
        self.granted: list[tuple[ModelClaim, KVBatchMeta, list[ModelRow]]] = []

    @initialize()
    def register(self) -> None:
        for name in self.names:
            self.clients[0].register_partition(name, SCHEMA)

    @rule(which=st.integers(0, 1))
    def register_again(self, which: int) -> None:
        self.clients[which].register_partition(self.names[MAIN], SCHEMA)

    @rule(which=st.integers(0, 1), where=partitions, chosen=samples, names=fields, number=st.integers(0, 99))
    def put(self, which: int, where: int, chosen: list[str], names: list[str], number: int) -> None:
        tags = [{"n": number}] * len(chosen) if number % 2 else None
        made = {name: columns_of(name, number, len(chosen)) for name in names} if chosen else {}
        self.clients[which].put_samples(chosen, made, self.names[where], tags)
        for sample in chosen:
            row = self.model[where].row(sample)
            row.cells.update(dict.fromkeys(names, number))
            row.tags.update({"n": number} if number % 2 else {})
        self._grant()

    @rule(
        which=st.integers(0, 1), where=partitions, chosen=st.lists(st.sampled_from("abcdef"), max_size=5), names=fields
    )
    def get(self, which: int, where: int, chosen: list[str], names: list[str]) -> None:
        meta = meta_of(self.names[where], *chosen)
        if not self.model[where].has(chosen, names):
            with pytest.raises(MissingRowError):
                self.clients[which].get_samples(meta, names)
            return
        batch = self.clients[which].get_samples(meta, names)
        assert (batch.sample_ids, list(batch.columns)) == (tuple(chosen), names)
        for name in names:
            expected = [self.model[where].rows[sample].cells[name] for sample in chosen]
            assert values_of(batch, name) == [value_of(name, number) for number in expected]

    @rule(which=st.integers(0, 1), where=partitions, chosen=samples)
    def clear(self, which: int, where: int, chosen: list[str]) -> None:
        self.clients[which].clear_samples(chosen, self.names[where])
        for sample in chosen:
            if self.model[where].rows.pop(sample, None) is not None:
                for free in self.model[where].free.values():
                    if sample in free:
                        free.remove(sample)

    @rule(which=st.integers(0, 1), chosen=samples, names=fields)
    def link(self, which: int, chosen: list[str], names: list[str]) -> None:
        meta, (main, kept) = meta_of(self.names[MAIN], *chosen), self.model
        if not main.has(chosen, names):
            with pytest.raises(MissingRowError):
                self.clients[which].link_samples(meta, names, self.names[KEPT])
            return
        self.clients[which].link_samples(meta, names, self.names[KEPT])
        for sample in chosen:
            row, linked = main.rows[sample], kept.row(sample)
            linked.cells.update({name: row.cells[name] for name in names})
            linked.tags.update(row.tags)
        self._grant()

    @rule(which=st.integers(0, 1), where=partitions, task=tasks, names=fields, count=st.integers(1, 3))
    def claim(self, which: int, where: int, task: str, names: list[str], count: int) -> None:
        client = self.clients[which]
        pending = client.begin_claim(self.names[where], task, names, count)
        client.count_samples(self.names[where])  # answered after the claim has arrived
        self.waiting.append(ModelClaim(client, pending, where, task, names, count))
        self._grant()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        claim = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        claim.pending.withdraw()
        with pytest.raises(ClaimWithdrawn) as caught:
            claim.pending.future.result(LONG)
        assert caught.value.ready == len(self.model[claim.where].ready(claim.task, claim.names))

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """Once for each claim; rows that were put anew meanwhile stay as they are, whoever has claimed them."""
        claim, meta, rows = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        model = self.model[claim.where]
        claim.pending.give_back(meta)
        claim.client.count_samples(self.names[claim.where])  # answered after the rows are back
        claimed = zip(meta.sample_ids, rows, strict=True)
        model.free[claim.task][:0] = [sample for sample, row in claimed if model.rows.get(sample) is row]
        self._grant()

    @rule(which=st.integers(0, 1), where=partitions, task=tasks)
    def status(self, which: int, where: int, task: str) -> None:
        found = self.clients[which].check_consumption_status(self.names[where], task)
        model = self.model[where]
        assert found == {sample: sample not in model.free[task] for sample in model.rows}

    @invariant()
    def counts_agree_and_nothing_else_is_granted(self) -> None:
        for where, name in enumerate(self.names):
            if self.clients[0].count_samples(name) != len(self.model[where].rows):
                raise AssertionError("rows are missing, or too many")
        assert not [claim for claim in self.waiting if claim.pending.future.done()]

    def teardown(self) -> None:
        for claim in self.waiting:
            claim.pending.withdraw()
        for name, model in zip(self.names, self.model, strict=True):
            self.clients[0].clear_samples(tuple(model.rows), name)

    def _grant(self) -> None:
        """Claims that wait get their rows as soon as all of them are there, the oldest claim first."""
        for claim in tuple(self.waiting):
            model = self.model[claim.where]
            chosen = model.ready(claim.task, claim.names)[: claim.count]
            if len(chosen) < claim.count:
                continue
            self.waiting.remove(claim)
            meta = claim.pending.future.result(LONG)
            rows = [model.rows[sample] for sample in chosen]
            assert (meta.partition_id, meta.task_name) == (self.names[claim.where], claim.task)
            assert meta.sample_ids == tuple(chosen)
            assert meta.sequence_lengths == tuple(row.tokens for row in rows)
            assert [dict(tags) for tags in meta.tags] == [row.tags for row in rows]
            assert meta.fields == set(claim.names)
            for sample in chosen:
                model.free[claim.task].remove(sample)
            self.granted.append((claim, meta, rows))


def columns_of(name: str, number: int, rows: int) -> Column:
    if name == "tokens":
        return JaggedColumn.from_rows([torch.tensor(value_of(name, number), dtype=torch.int64)] * rows)
    return torch.full((rows,), float(number)) if name == "reward" else ObjectColumn((value_of(name, number),) * rows)


def value_of(name: str, number: int) -> Any:
    if name == "tokens":
        return [number] * (number % 4)
    return float(number) if name == "reward" else (None if number % 3 == 0 else {"number": [number]})


def values_of(batch: SampleBatch, name: str) -> list[Any]:
    if name == "tokens":
        return [batch.jagged(name).row(row).tolist() for row in range(len(batch))]
    return batch.tensor(name).tolist() if name == "reward" else list(batch.objects(name).items)


def walk(clients: Opened, examples: int, calls: int) -> None:
    run_state_machine_as_test(
        lambda: Calls(clients),
        settings=settings(
            max_examples=examples,
            stateful_step_count=calls,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_calls_in_any_order_do_what_the_model_does(clients: Opened) -> None:
    walk(clients, 12, 25)


@pytest.mark.long
def test_many_calls_in_any_order_do_what_the_model_does(clients: Opened) -> None:
    walk(clients, 100, 60)

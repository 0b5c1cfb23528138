"""The replay buffer's state as JSON, and the full check a state must pass before any of it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator
from pydantic_core import PydanticSerializationError

from penstock.buffer.quota import Quota
from penstock.buffer.slots import Clock, Slot, SlotState
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import BufferStateError


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MetaState(_State):
    """A ready group's `KVBatchMeta`."""

    partition_id: str
    sample_ids: Annotated[list[str], Field(min_length=1)]
    fields: list[str]
    sequence_lengths: list[NonNegativeInt]
    tags: list[dict[str, Any]]
    task_name: str | None
    extra_info: dict[str, Any]

    @model_validator(mode="after")
    def _one_entry_per_row(self) -> Self:
        rows = len(self.sample_ids)
        if len(self.sequence_lengths) != rows or len(self.tags) != rows:
            raise ValueError("sample_ids, sequence_lengths and tags differ in length")
        return self

    @classmethod
    def of(cls, meta: KVBatchMeta) -> MetaState:
        return cls(
            partition_id=meta.partition_id,
            sample_ids=list(meta.sample_ids),
            fields=sorted(meta.fields),
            sequence_lengths=list(meta.sequence_lengths),
            tags=[dict(tags) for tags in meta.tags],
            task_name=meta.task_name,
            extra_info=dict(meta.extra_info),
        )

    def to_meta(self) -> KVBatchMeta:
        return KVBatchMeta(
            partition_id=self.partition_id,
            sample_ids=tuple(self.sample_ids),
            fields=frozenset(self.fields),
            sequence_lengths=tuple(self.sequence_lengths),
            tags=tuple(self.tags),
            task_name=self.task_name,
            extra_info=self.extra_info,
        )


class ReadyState(_State):
    """A READY slot."""

    group_id: str
    sequence: NonNegativeInt
    start_version: NonNegativeInt
    target_step: NonNegativeInt | None
    end_version: NonNegativeInt
    ready_order: NonNegativeInt
    meta: MetaState

    @classmethod
    def of(cls, slot: Slot) -> ReadyState:
        assert slot.meta is not None
        assert slot.end_version is not None
        assert slot.ready_order is not None
        return cls(
            group_id=slot.group_id,
            sequence=slot.sequence,
            start_version=slot.start_version,
            target_step=slot.target_step,
            end_version=slot.end_version,
            ready_order=slot.ready_order,
            meta=MetaState.of(slot.meta),
        )

    def to_slot(self) -> Slot:
        return Slot(
            group_id=self.group_id,
            sequence=self.sequence,
            start_version=self.start_version,
            target_step=self.target_step,
            state=SlotState.READY,
            meta=self.meta.to_meta(),
            end_version=self.end_version,
            ready_order=self.ready_order,
        )


class ClockState(_State):
    """The clock."""

    trainer_version: NonNegativeInt
    served_version: NonNegativeInt
    step: NonNegativeInt

    @classmethod
    def of(cls, clock: Clock) -> ClockState:
        return cls(trainer_version=clock.trainer_version, served_version=clock.served_version, step=clock.step)

    def to_clock(self) -> Clock:
        return Clock(self.trainer_version, self.served_version, self.step)


class TargetState(_State):
    """Outstanding units of quota of one step that is not over."""

    target_step: NonNegativeInt
    units: NonNegativeInt


class BufferState(_State):
    """A buffer between two steps: READY slots, clock and counts. Groups under way count as returned."""

    format: Literal[1]
    clock: ClockState
    next_sequence: NonNegativeInt
    next_ready_order: NonNegativeInt
    dispatched: NonNegativeInt
    returned: NonNegativeInt
    outstanding: list[TargetState]
    ready: list[ReadyState]

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        problems = [*self._slot_problems(), *self._quota_problems()]
        if self.clock.served_version > self.clock.trainer_version:
            problems.append("served_version is ahead of trainer_version")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _slot_problems(self) -> list[str]:
        problems = []
        for what in ("group_id", "sequence", "ready_order"):
            counts = Counter(getattr(slot, what) for slot in self.ready)
            problems += [f"{what} {value} occurs {count} times" for value, count in counts.items() if count > 1]
        for slot in self.ready:
            where = f"group {slot.group_id}"
            if slot.sequence >= self.next_sequence:
                problems.append(f"{where}: sequence {slot.sequence} has not been given out yet")
            if slot.ready_order >= self.next_ready_order:
                problems.append(f"{where}: ready_order {slot.ready_order} has not been given out yet")
            if slot.start_version > self.clock.trainer_version:
                problems.append(f"{where}: start_version {slot.start_version} is ahead of the trainer")
            if slot.end_version < slot.start_version:
                problems.append(f"{where}: end_version {slot.end_version} is before its start_version")
        return problems

    def _quota_problems(self) -> list[str]:
        problems = []
        units = self.dispatched - self.returned
        by_target = self.units_by_target
        if units < len(self.ready):
            problems.append(f"{len(self.ready)} ready groups on {units} outstanding units of quota")
        if units < sum(by_target.values()):
            problems.append(f"{sum(by_target.values())} units of quota of single steps, but {units} in all")
        if len(by_target) != len(self.outstanding):
            problems.append("outstanding names a step twice")
        held = Counter(slot.target_step for slot in self.ready if slot.target_step is not None)
        for target, count in held.items():
            if target >= self.clock.step and by_target.get(target, 0) < count:
                problems.append(f"{count} ready groups for step {target} on {by_target.get(target, 0)} units of quota")
        return problems

    @property
    def units_by_target(self) -> dict[int, int]:
        return {each.target_step: each.units for each in self.outstanding}

    @classmethod
    def of(
        cls, clock: Clock, quota: Quota, ready: Sequence[Slot], next_sequence: int, next_ready_order: int
    ) -> BufferState:
        return cls(
            format=1,
            clock=ClockState.of(clock),
            next_sequence=next_sequence,
            next_ready_order=next_ready_order,
            dispatched=quota.dispatched,
            returned=quota.returned,
            outstanding=[TargetState(target_step=step, units=units) for step, units in quota.by_target.items()],
            ready=[ReadyState.of(slot) for slot in ready],
        )

    def to_json(self) -> dict[str, Any]:
        try:
            return self.model_dump(mode="json")
        except PydanticSerializationError as error:
            raise BufferStateError(
                f"a tag or extra_info of a ready group cannot be written as JSON: {error}"
            ) from error

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> BufferState:
        """The state, checked; raises `BufferStateError` with every problem found."""
        try:
            return cls.model_validate(state)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, each['loc'])) or 'state'}: {each['msg']}" for each in error.errors()]
            raise BufferStateError("the replay buffer's saved state is damaged: " + "; ".join(lines)) from error

"""Short ways to say what the buffer's tests do all the time."""

from __future__ import annotations

from penstock.buffer.replay_buffer import ReplayBuffer
from penstock.buffer.slots import Slot
from penstock.data_plane.meta import KVBatchMeta


def rows(group_id: str, count: int = 2) -> KVBatchMeta:
    """Metadata of a group's rows."""
    return KVBatchMeta(
        partition_id="train",
        sample_ids=tuple(f"{group_id}_g{i}" for i in range(count)),
        fields=frozenset({"input_ids", "reward"}),
        sequence_lengths=tuple(5 + i for i in range(count)),
        tags=tuple({"env": "echo", "index": i} for i in range(count)),
        extra_info={"prompt": group_id},
    )


def dispatch(buffer: ReplayBuffer, *group_ids: str) -> list[Slot]:
    """Dispatch groups, each with the stamp that the sampler gives it."""
    slots = []
    for group_id in group_ids:
        admission = buffer.try_admission()
        assert admission is not None, f"{group_id} was not admitted"
        slots.append(buffer.reserve(group_id, admission.start_version, admission.target_step))
    return slots


def commit(buffer: ReplayBuffer, *group_ids: str) -> None:
    """Commit groups that ended with the version now served."""
    for group_id in group_ids:
        buffer.commit(group_id, rows(group_id), buffer.clock.served_version)


def finish_step(buffer: ReplayBuffer) -> None:
    """A step that changed the weights, with the engines already serving them."""
    version, step = buffer.clock.trainer_version + 1, buffer.clock.step + 1
    buffer.advance(trainer_version=version, served_version=version, step=step)


def ids(slots: list[Slot]) -> list[str]:
    return [slot.group_id for slot in slots]

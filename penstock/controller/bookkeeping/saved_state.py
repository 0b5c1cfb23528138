"""The controller's state, taken for a checkpoint and restored from one."""

from __future__ import annotations

from penstock.buffer.slots import SlotState
from penstock.controller.bookkeeping.group_book import BookState, GroupBook
from penstock.controller.bookkeeping.ledger import Ledger
from penstock.controller.bookkeeping.snapshot import ControllerSnapshot, ControllerState
from penstock.controller.bookkeeping.throughput import Throughput
from penstock.controller.failures.drops import DropBook
from penstock.controller.parts import Parts
from penstock.data_plane.meta import KVBatchMeta
from penstock.errors import SetupError
from penstock.rollout.manager import PARTITION


class SavedState:
    """Takes and restores snapshots of everything but the trainer.

    Groups under way are not part of a snapshot, nor, unless `keeps_ready`, ready ones: their prompts are dispatched
    again. In deterministic mode none are kept, so that prompts are dispatched in the order in which they would have
    been.
    """

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        book: GroupBook,
        drops: DropBook,
        throughput: Throughput,
        *,
        keeps_ready: bool,
        truncates: bool,
    ) -> None:
        """`truncates`: the run samples from truncated distributions."""
        self._parts = parts
        self._ledger = ledger
        self._book = book
        self._drops = drops
        self._throughput = throughput
        self._keeps_ready = keeps_ready
        self._truncates = truncates

    async def take(self) -> ControllerSnapshot:
        """The state between two steps."""
        parts, keeps_ready = self._parts, self._keeps_ready
        ends, redispatches = self._ledger.state()
        book = self._book.state()
        drops = self._drops.state()
        state = ControllerState(
            stream=parts.stream.digest,
            redispatches=redispatches,
            ready=book.ready if keeps_ready else {},
            groups=book.groups,
            committed=book.committed,
            dropped=drops["dropped"],
            bound_drops=drops["bound"],
            free_drops=drops["free"],
            events=parts.events.counts,
            tokens_generated=self._throughput.tokens,
            elapsed_seconds=self._throughput.elapsed,
            buffer=parts.buffer.state_dict(with_ready=keeps_ready),
        )
        metas = [slot.meta for slot in parts.buffer.slots(SlotState.READY) if slot.meta is not None and keeps_ready]
        rows = None
        if metas:
            joined = KVBatchMeta.concat(metas)
            rows = await parts.data_plane.get_samples_async(joined, sorted(joined.fields))
        return ControllerSnapshot(state, ends, rows)

    async def restore(self, snapshot: ControllerSnapshot) -> None:
        """Continue from a snapshot; nothing may have been dispatched yet."""
        state, parts = snapshot.state, self._parts
        if state.stream != parts.stream.digest:
            raise SetupError(
                "data: the prompts, or their order, are not those of the run that is resumed: some prompts could be "
                "trained twice or never. Use the same data and seed, or start a new run"
            )
        if self._truncates:
            snapshot.require_kept_tokens()
        parts.buffer.load_state_dict(state.buffer)
        self._ledger.restore(snapshot.ends, state.redispatches)
        self._book.restore(BookState(state.groups, state.committed, state.ready))
        self._drops.restore(state.dropped, state.bound_drops, state.free_drops)
        parts.events.restore_counts(state.events)
        self._throughput.restore(state.tokens_generated, state.elapsed_seconds)
        if snapshot.rows is not None:
            await parts.data_plane.put_samples_async(snapshot.rows.sample_ids, snapshot.rows.columns, PARTITION)

"""A slow replay buffer that is easy to believe: one list of all groups ever, and a scan for every question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.buffer.samplers.base import StalenessSampler
from penstock.buffer.samplers.in_order import InOrder
from penstock.buffer.samplers.on_policy import OnPolicy
from penstock.buffer.samplers.ready_first import ReadyFirst
from penstock.buffer.samplers.weight_fifo import WeightFifo
from penstock.buffer.samplers.windowed import Order, Windowed

Kind = Literal["on_policy", "windowed", "in_order", "weight_fifo", "ready_first"]


@dataclass(frozen=True)
class Policy:
    """Settings of a sampler, in one class for all kinds."""

    kind: Kind
    n: int
    window: int = 0
    lookahead: int = 0
    over_sampling: bool = False
    freshest: bool = False
    strict: bool = False

    @property
    def counts_per_target(self) -> bool:
        """Whether a step has units of quota of its own, or takes from a running total."""
        return self.kind in ("on_policy", "in_order")

    def sampler(self) -> StalenessSampler:
        match self.kind:
            case "on_policy":
                return OnPolicy(self.n)
            case "windowed":
                order = Order.FRESHEST if self.freshest else Order.OLDEST
                return Windowed(self.n, self.window, self.over_sampling, order)
            case "in_order":
                return InOrder(self.n, self.lookahead, self.strict)
            case "weight_fifo":
                return WeightFifo(self.n, self.window, self.lookahead)
            case "ready_first":
                return ReadyFirst(self.n, self.lookahead)


@dataclass
class Group:
    """A group's whole life."""

    group_id: str
    sequence: int
    start: int
    target: int | None
    state: str = "reserved"
    ready_order: int = -1
    holds_unit: bool = True


class ReferenceBuffer:
    """Says what `ReplayBuffer` should say."""

    def __init__(self, policy: Policy, max_groups: int) -> None:
        self.policy = policy
        self.max_groups = max_groups
        self.groups: list[Group] = []
        self.sequences = 0
        self.commits = 0
        self.version = self.served = self.step = 0

    def in_state(self, state: str) -> list[Group]:
        found = [group for group in self.groups if group.state == state]
        return sorted(found, key=lambda group: group.sequence)

    @property
    def permits_taken(self) -> int:
        return len(self.in_state("reserved")) + len(self.in_state("ready"))

    def units(self, target: int | None = None) -> int:
        return sum(1 for g in self.groups if g.holds_unit and (target is None or g.target == target))

    def admit(self) -> tuple[int, int | None] | None:
        if self.permits_taken == self.max_groups:
            return None
        p = self.policy
        behind = self.version - self.served
        ahead = {
            "in_order": p.lookahead - behind,
            "weight_fifo": min(p.lookahead, p.window - behind),
        }.get(p.kind, p.lookahead)
        targets = range(self.step, self.step + ahead + 1)
        match p.kind:
            case "on_policy":
                if self.served == self.version and self.units(self.step) < p.n:
                    return self.served, self.step
            case "windowed":
                room = p.over_sampling or self.units() < (self.step + 1 + p.window - behind) * p.n
                if room and self.served >= self.version - p.window:
                    return self.served, None
            case "in_order":
                for target in targets:
                    if self.units(target) < p.n:
                        return self.served, target
            case "weight_fifo" | "ready_first":
                fresh = p.kind == "ready_first" or self.served >= self.version - p.window
                for target in targets if fresh else ():
                    if self.units() < (target + 1) * p.n:
                        return self.served, target
        return None

    def reserve(self, group_id: str, start: int, target: int | None) -> None:
        self.groups.append(Group(group_id, self.sequences, start, target))
        self.sequences += 1

    def retry(self, old: Group, new_id: str) -> None:
        old.state, old.holds_unit = "retried", False
        self.groups.append(Group(new_id, old.sequence, self.served, old.target))

    def commit(self, group: Group) -> None:
        group.state, group.ready_order = "ready", self.commits
        self.commits += 1

    def _in_window(self, group: Group) -> bool:
        return self.version - self.policy.window <= group.start <= self.version

    def selectable(self) -> list[Group]:
        ready, reserved, p = self.in_state("ready"), self.in_state("reserved"), self.policy
        match p.kind:
            case "on_policy":
                return [g for g in ready if g.start == self.version]
            case "windowed":
                sign = -1 if p.freshest else 1
                return sorted(filter(self._in_window, ready), key=lambda g: (sign * g.start, g.sequence))
            case "in_order":
                mine = [g for g in ready if g.target == self.step]
                pending = [g.sequence for g in reserved if g.target == self.step] if p.strict else []
                return [g for g in mine if all(g.sequence < other for other in pending)]
            case "weight_fifo":
                pending = [g.start for g in reserved if self._in_window(g)]
                open_ = [g for g in ready if self._in_window(g) and all(g.start <= other for other in pending)]
                return sorted(open_, key=lambda g: (g.start, g.sequence))
            case "ready_first":
                return sorted(ready, key=lambda g: g.ready_order)

    def stale(self) -> list[Group]:
        ready = self.in_state("ready")
        match self.policy.kind:
            case "on_policy":
                return [g for g in ready if g.start < self.version]
            case "windowed" | "weight_fifo":
                return [g for g in ready if g.start < self.version - self.policy.window]
            case "in_order":
                return [g for g in ready if g.target is not None and g.target < self.step]
            case "ready_first":
                return []

    def stale_inflight(self) -> list[Group]:
        if self.policy.kind not in ("on_policy", "windowed"):
            return []
        return [g for g in self.in_state("reserved") if g.start < self.version - self.policy.window]

"""One process of a chaos run: the `penstock` command with faulty parts in the place of the real ones.

    python -m benchmarks.support.chaos_process NOTES PROCESS SEED RATE train CONFIG [KEY=VALUE ...]
    python -m benchmarks.support.chaos_process NOTES PROCESS SEED RATE resume RUN_DIR [--checkpoint NAME] [KEY=VALUE]

Each faulty part is the real one and fails around, or inside, its work; the product knows nothing of it. `NOTES` gets a
line for every fault as it happens, one when training begins and one when it ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.support.chaos_faults import FaultPlan, Injector, Kind, Notes, Site
from benchmarks.support.chaos_rewards import Injected, score
from penstock.controller.controller import SingleController
from penstock.data_plane.adapters.memory import MemoryDataPlane
from penstock.data_plane.columns import Column
from penstock.data_plane.fields import INPUT_IDS, group_of
from penstock.data_plane.meta import Tags
from penstock.errors import EngineError
from penstock.rollout.engines.base import GenerationRequest, GenerationResult
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.environments.base import GenerationHandle, Segment, Trajectory, checked_reward
from penstock.rollout.environments.custom import PromptData
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.rollout.environments.tasks.reasoning_gym import ReasoningGymEnvironment
from penstock.rollout.manager import PARTITION
from penstock.rollout.prompts import Prompt
from penstock.training.interface import StepResult
from penstock.training.workers.local import LocalTrainer

R = TypeVar("R")

SLOW_SECONDS = 0.5
TASK = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
_THE_STEP = "step"
"""Whose attempts faults of the trainer, and of writes for the open step, cost."""


class Faulty:
    """What the faulty parts share; set before the run builds them."""

    injector: Injector
    notes: Notes
    prompt_of: dict[str, int]
    """By group: its prompt. Every attempt of a prompt is a group of its own."""


class FaultyEngine(EmbeddedEngine):
    """Loses its connection, never answers, or answers late."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        prompt = Faulty.prompt_of[request.group_id] = hash(request.prompt_ids)
        fault = Faulty.injector.draw(Site.ENGINE, ("machinery", prompt))
        if fault is not None and fault.kind is Kind.ENGINE_RAISES:
            raise ConnectionResetError("injected") if fault.call % 2 else EngineError("injected")
        result = await super().generate(request)
        if fault is not None and fault.kind is Kind.ENGINE_HANGS:
            await asyncio.Event().wait()
        if fault is not None and fault.kind is Kind.ENGINE_SLOW:
            await asyncio.sleep(SLOW_SECONDS)
        return result


class FaultyEnvironment(ReasoningGymEnvironment):
    """Sums, whose reward raises, never comes, is not a number, freezes its interpreter or ends its process."""

    def __init__(self, data: PromptData, pool: RewardPool, seed: int) -> None:
        super().__init__("chain_sum", TASK, pool, train_size=data.train_size, eval_size=data.eval_size, seed=seed)

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        prompt_ids = handle.encode_prompt(prompt.content)
        generation = await handle.generate(prompt_ids)
        response = handle.decode(generation.token_ids)
        fault = Faulty.injector.draw(Site.REWARD, ("data", prompt.prompt_id))
        kind = None if fault is None else fault.kind.value
        value = await self._pool.score(score, response, str(prompt.answer), kind)
        segments = (Segment(prompt_ids), Segment(generation.token_ids, generation))
        return Trajectory(segments, checked_reward(value, prompt), response)


class FaultyTrainer(LocalTrainer):
    """Raises inside a step: after a pass has left its gradients, or at the end when they have been divided."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        backend = self._worker._backend
        backend._forward_backward = _failing_after(Site.MICROBATCH, backend._forward_backward)
        backend.norm = _failing_after(Site.FINISH, backend.norm)

    async def finish_train_step(self, step_id: int, *, last: bool = True) -> StepResult:
        result = await super().finish_train_step(step_id, last=last)
        Faulty.injector.forgive(_THE_STEP)
        return result


def _failing_after(site: Site, work: Callable[..., R]) -> Callable[..., R]:
    def faulty(*args: Any, **kwargs: Any) -> R:
        result = work(*args, **kwargs)
        if Faulty.injector.draw(site, _THE_STEP) is not None:
            raise Injected("injected")
        return result

    return faulty


class FaultyDataPlane(MemoryDataPlane):
    """A write is lost, or done and not acknowledged, in turns."""

    def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Column],
        partition_id: str,
        tags: Sequence[Tags] | None = None,
    ) -> None:
        prompt = Faulty.prompt_of.get(group_of(sample_ids[0]))
        fault = Faulty.injector.draw(Site.PUT, ("machinery", prompt) if INPUT_IDS in fields else _THE_STEP)
        if fault is None or fault.call % 2:
            super().put_samples(sample_ids, fields, partition_id, tags)
        if fault is not None:
            raise ConnectionAbortedError("injected")


class WatchedController(SingleController):
    """Tells when training begins and ends, of which prompts, and what is left behind."""

    async def run(self) -> str:
        stream = self._parts.stream
        Faulty.injector.arm()
        Faulty.notes.write("begin", visits=[[visit.epoch, visit.prompt.prompt_id] for visit in stream])
        reason = await super().run()
        rows = self._parts.data_plane.count_samples(PARTITION)
        groups = self._parts.buffer.reserved + self._parts.buffer.ready
        Faulty.notes.write("end", reason=reason, rows=rows, groups=groups)
        return reason


def install(plan: FaultPlan, notes: Notes) -> None:
    """Put the faulty parts where a run takes its parts from."""
    from penstock.data_plane import opening
    from penstock.run import build_engines, build_trainer, life

    Faulty.injector, Faulty.notes, Faulty.prompt_of = Injector(plan, notes), notes, {}
    build_engines._ENGINES["embedded"] = FaultyEngine.from_pretrained
    build_trainer._TRAINERS["local"] = FaultyTrainer.from_pretrained
    opening.ADAPTERS["memory"] = lambda config: FaultyDataPlane()
    life.SingleController = WatchedController  # type: ignore[misc]


def main(notes: str, process: str, seed: str, rate: str, *command: str) -> None:
    from penstock.cli.main import main as penstock

    install(FaultPlan(int(seed), int(process), float(rate)), Notes(Path(notes), int(process)))
    sys.argv = ["penstock", *command]
    penstock()


if __name__ == "__main__":
    # The module as the environment's path names it: `__main__` would be another one, without the injector.
    from benchmarks.support.chaos_process import main as run_process

    run_process(*sys.argv[1:])

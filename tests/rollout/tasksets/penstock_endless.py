"""A verifiers taskset that never ends and only knows three different tasks."""

import itertools

import verifiers.v1 as vf

__all__ = ["EndlessTaskset"]


class EndlessTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def fine(self) -> float:
        return 1.0


class EndlessTaskset(vf.Taskset[EndlessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield EndlessTask(vf.TaskData(prompt=f"say w{number % 3}"))

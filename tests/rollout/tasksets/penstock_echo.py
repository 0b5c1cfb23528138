"""A verifiers taskset of single-turn tasks: repeat a word. Some have rewards that go wrong."""

import asyncio

import verifiers.v1 as vf

__all__ = ["EchoTaskset"]


class EchoData(vf.TaskData):
    answer: str


class EchoTask(vf.Task[EchoData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def repeats(self, trace: vf.Trace) -> float:
        if self.data.answer == "w3":
            raise RuntimeError("w3 has no reward")
        if self.data.answer == "w8":
            await asyncio.Event().wait()
        return 1.0 if trace.last_reply == self.data.answer else 0.0

    @vf.reward(weight=0.5)
    async def speaks(self, trace: vf.Trace) -> float:
        return 1.0 if trace.last_reply else 0.0


class EchoConfig(vf.TasksetConfig):
    words: int = 4


class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    def load(self):
        for number in range(self.config.words):
            yield EchoTask(EchoData(prompt=f"say w{number}", answer=f"w{number}"))

"""A verifiers taskset with a tool that all tasks share; the tool's server is already running."""

import verifiers.v1 as vf

__all__ = ["AddingTaskset"]


class AddingTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "sum"


class AddingData(vf.TaskData):
    answer: str


class AddingTask(vf.Task[AddingData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 1.0 if trace.last_reply == self.data.answer else 0.0


class AddingConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class AddingTaskset(vf.Taskset[AddingTask, AddingConfig]):
    def load(self):
        for number in range(1, 5):
            yield AddingTask(AddingData(prompt=f"add {number} and {number}", answer=str(2 * number)))

    @classmethod
    def toolsets(cls, config):
        return [AddingTools(config.tools)]

"""A verifiers environment that plays two agents, both of them to be trained."""

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]


class DuelTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def fine(self) -> float:
        return 1.0


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        yield DuelTask(vf.TaskData(prompt="one"))
        yield DuelTask(vf.TaskData(prompt="two"))


class DuelConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        await agents.left.run(task)
        await agents.right.run(task)

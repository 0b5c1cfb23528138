"""A verifiers environment of several turns: the user says higher or lower until the model has guessed the number."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return 1.0 if trace.last_reply.strip() == str(self.data.number) else 0.0


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in range(2, 6):
            yield GuessTask(GuessData(prompt="guess", number=number))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            said = await game.turn()
            for _ in range(4):
                guess = said.last_reply.strip()
                if said.terminated or guess == str(task.data.number):
                    return
                said = await game.turn("up" if guess < str(task.data.number) else "down")

"""A verifiers taskset whose own program asks twice, the second time without its first turn."""

import aiohttp
import verifiers.v1 as vf

__all__ = ["ForgetfulHarness", "ForgetfulTaskset"]


class ForgetfulTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def fine(self) -> float:
        return 1.0


class ForgetfulTaskset(vf.Taskset[ForgetfulTask, vf.TasksetConfig]):
    def load(self):
        yield ForgetfulTask(vf.TaskData(prompt="one"))
        yield ForgetfulTask(vf.TaskData(prompt="two"))


class ForgetfulHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for prompt in (data.prompt, "and now?"):
                body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
                async with http.post(f"{endpoint}/chat/completions", json=body) as reply:
                    await reply.json()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

"""The program of a verifiers agent that does not bring one: a chat loop with the task's tools, in this process."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from penstock.rollout.environments.turns.tool_calls import NotPassable, read_json
from penstock.rollout.environments.verifiers.client import OVERFLOW

HARNESS = "penstock_chat"


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """The program of an agent that has none: a chat with the task's tools, run in this process, not in one each."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Chat until the model calls no tool, or may not continue."""
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        messages = self._opening(data)
        async with AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            http = await stack.enter_async_context(aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}))
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while (message := await self._ask(http, endpoint, body, trace)) is not None:
                messages.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    messages.append(await _tool_message(call, dispatch, connections))
                if not calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or [])]

    async def _ask(self, http: Any, endpoint: str, body: dict[str, Any], trace: Any) -> dict[str, Any] | None:
        async with http.post(f"{endpoint}/chat/completions", json=body) as reply:
            said = await reply.json()
        if reply.status == 200:
            return said["choices"][0]["message"]  # type: ignore[no-any-return]
        if trace.stop_condition is not None or OVERFLOW in json.dumps(said):
            return None
        raise RuntimeError(f"the model call failed: {said}")


async def _tool_message(call: Mapping[str, Any], dispatch: Any, connections: Any) -> dict[str, Any]:
    name = call["function"]["name"]
    try:
        arguments = read_json(call["function"]["arguments"])
    except NotPassable as problem:
        content: Any = f"error: arguments are not JSON that can be passed on: {problem}"
    else:
        if name not in dispatch:
            content = f"error: there is no tool {name!r}"
        elif not isinstance(arguments, dict):
            content = "error: arguments must be a JSON object"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _register_harness() -> None:
    """Verifiers finds a harness by the name of a module that exports it."""
    plugin = types.ModuleType(HARNESS, "The chat harness of Penstock, as verifiers looks for it.")
    plugin.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules.setdefault(HARNESS, plugin)


_register_harness()

"""`verifiers:<environment>`: environments of the verifiers package, played by Penstock's engine.

The only file that imports verifiers, itself imported only where one is asked for. In verifiers an agent's program (a
harness) reaches its model through a server in this process, which asks a client for each completion. The client here
asks the sample's generation handle, so that tokens, log-probs and weight versions are the engine's own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import aiohttp
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from penstock.config.data import PROCEDURAL_TRAIN_SIZE
from penstock.errors import ConfigError, EnvironmentFailure, PenstockError, PromptTooLong, SetupError
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.environments.base import GenerationHandle, Split, Trajectory
from penstock.rollout.environments.conversation import Conversation
from penstock.rollout.environments.limits import TurnLimits
from penstock.rollout.environments.tool_calls import parse_tool_calls
from penstock.rollout.prompts import Message, Prompt

_ARGS = "rollout.environment.args"
_HARNESS = "penstock_chat"
_OVERFLOW = "maximum context length"
"""What verifiers' own programs, too, take for the end of the context."""


@dataclass
class _Sample:
    """What the client knows of one sample: its handle, and a conversation for each trace."""

    handle: GenerationHandle
    talks: dict[str, Conversation] = field(default_factory=dict)
    generating: set[str] = field(default_factory=set)
    failure: PenstockError | None = None
    """What stopped it; verifiers only hands on its text."""
    out_of_room: bool = False


class EngineClient(vf.Client):  # type: ignore[misc]
    """Answers the model calls of all samples, each through its own handle; a sample is known by its trace's id."""

    def __init__(self) -> None:
        self.samples: dict[str, _Sample] = {}

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One completion, as verifiers wants it."""
        sample = self.samples[session_id or ""]
        try:
            return await self._respond(sample, session_id or "", dialect, body, turn)
        except PromptTooLong as error:
            if not sample.talks[session_id or ""].generations:
                sample.failure = error
            sample.out_of_room = True
            raise vf.ProviderError(f"{_OVERFLOW} reached: {error}", status_code=400) from error
        except PenstockError as error:
            sample.failure = error
            raise vf.ProviderError(str(error), status_code=400) from error

    async def _respond(self, sample: _Sample, trace: str, dialect: Any, body: dict[str, Any], turn: Any) -> Any:
        if not isinstance(dialect, ChatDialect):
            raise EnvironmentFailure("the environment's program uses another API than chat completions: not supported")
        if trace in sample.generating:
            raise EnvironmentFailure("the environment's program makes model calls side by side: not supported")
        talk, tools = sample.talks[trace], [tool_to_wire(tool) for tool in turn.tools]
        messages = [_plain(message_to_wire(message)) for message in turn.prompt]
        if talk.generations:
            talk.reply(talk.tail_of(messages), tools)
        else:
            talk.open(messages, tools)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        sample.generating.add(trace)
        try:
            generation = await sample.handle.generate(talk.ids, max_new_tokens=limit)
        finally:
            sample.generating.discard(trace)
        response = _response(generation, sample.handle, bool(tools), len(talk.ids), body["model"])
        talk.add(generation, message_to_wire(response.message))
        return response


def _plain(message: Mapping[str, Any]) -> Message:
    if isinstance(message.get("content"), list):
        raise EnvironmentFailure("the environment shows the model images, or content in parts: not supported")
    return {**message, "content": message.get("content") or ""}


def _response(generation: GenerationResult, handle: GenerationHandle, tools: bool, prompt: int, model: str) -> Any:
    text = handle.decode(generation.token_ids)
    content, calls = parse_tool_calls(text) if tools else (text, [])
    finish = "length" if generation.finish_reason is FinishReason.LENGTH else "tool_calls" if calls else "stop"
    made = [vf.ToolCall(id=f"call_{uuid.uuid4().hex[:12]}", name=c.name, arguments=c.arguments) for c in calls]
    response = vf.Response(
        id=generation.request_id,
        created=0,
        model=model,
        message=vf.AssistantMessage(content=content, tool_calls=made or None),
        finish_reason=finish,
        usage=vf.Usage(prompt_tokens=prompt, completion_tokens=len(generation.token_ids)),
    )
    response.raw = serialize_completion(response, model)
    return response


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """No settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """The program of an agent that has none: a chat with the task's tools, run in this process and not in one each."""

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
        """Chat until the model calls no tool, or may not go on."""
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
        if trace.stop_condition is not None or _OVERFLOW in json.dumps(said):
            return None
        raise RuntimeError(f"the model call failed: {said}")


async def _tool_message(call: Mapping[str, Any], dispatch: Any, connections: Any) -> dict[str, Any]:
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"]["arguments"])
    except json.JSONDecodeError as error:
        content: Any = f"error: arguments are not JSON: {error}"
    else:
        if name not in dispatch:
            content = f"error: there is no tool {name!r}"
        elif not isinstance(arguments, dict):
            content = "error: arguments must be a JSON object"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


class VerifiersEnvironment:
    """One episode per sample; its one trainable trace is the trajectory.

    The first `eval_size` tasks of the taskset are held out, the rest are for training. Its servers start with the
    first sample and end with `close`.
    """

    def __init__(
        self, name: str, args: Mapping[str, Any], limits: TurnLimits, *, train_size: int | None, eval_size: int
    ) -> None:
        self._name, self._limits = name, limits
        self._env = _load(name, args)
        self._client = EngineClient()
        self._model = vf.ModelContext(model="penstock", client=vf.TrainClientConfig(base_url="http://penstock.invalid"))
        self._prompts = _prompts(self._env.taskset, train_size, eval_size)
        self._server: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stop = asyncio.Event()

    @property
    def name(self) -> str:
        return f"verifiers:{self._name}"

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[split]

    async def run(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        """Play one episode. Starting verifiers' servers is not counted as the environment's time."""
        if self._server is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(self._serve(self._ready))
        assert self._ready is not None
        await asyncio.shield(self._ready)
        return await self._limits.play(self._play, prompt, handle, self.name)

    async def close(self) -> None:
        """End verifiers' servers; a second call is a no-op."""
        self._stop.set()
        if self._server is not None:
            await self._server

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                # The server makes one client per endpoint configuration and looks here for it first.
                self._env._interception.clients[self._model.client.model_dump_json()] = self._client
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - told to every sample that waits
            if not ready.done():
                reason = f"{self.name}: its servers could not start: {type(error).__name__}: {error}"
                ready.set_exception(EnvironmentFailure(reason))

    async def _play(self, prompt: Prompt, handle: GenerationHandle) -> Trajectory:
        sample = _Sample(handle)

        def minted(trace: Any) -> None:
            sample.talks[trace.id] = Conversation(handle)
            self._client.samples[trace.id] = sample

        [slot] = self._env.slots(prompt.facts["task"])
        try:
            episode = await self._env.run_slot(slot, self._model, on_trace=minted)
        finally:
            for trace_id in sample.talks:
                del self._client.samples[trace_id]
        if sample.failure is not None:
            raise sample.failure
        trace = _trained_trace(episode, self.name)
        return _trajectory(sample.talks[trace.id], _reward(trace, self.name), sample.out_of_room)


def _trained_trace(episode: Any, name: str) -> Any:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason given"
        raise EnvironmentFailure(f"{name}: the episode failed: {reason}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise EnvironmentFailure(
            f"{name}: an episode has {len(traces)} trainable agents; Penstock trains one per sample. An environment "
            "marks others with `agents.<role>.trainable = False` in its setup()"
        )
    return traces[0]


def _reward(trace: Any, name: str) -> float:
    missing = [reward for reward, value in trace.rewards.items() if value is None]
    if missing or not trace.rewards:
        why = f"{', '.join(missing)} not scored" if missing else "its task has no @reward"
        raise EnvironmentFailure(f"{name}: there is no reward: {why} (stopped by {trace.stop_condition})")
    return float(trace.reward)


def _trajectory(talk: Conversation, reward: float, out_of_room: bool) -> Trajectory:
    talk.drop_reply()
    first = next((i for i, message in enumerate(talk.messages) if message["role"] == "assistant"), 0)
    text = "\n".join(str(message.get("content") or "") for message in talk.messages[first:])
    return Trajectory(tuple(talk.segments), reward, text, out_of_room)


def _load(name: str, args: Mapping[str, Any]) -> Any:
    """The environment, with roles that say nothing about it set up to run in this process."""
    if "interception" in args:
        raise ConfigError([f"{_ARGS}.interception: is set by Penstock; remove it"])
    taskset = args.get("taskset", {})
    raw: dict[str, Any] = {**args, "taskset": {**taskset, "id": name}, "interception": {"type": "server"}}
    try:
        for role, default in _roles(name, str(args.get("id", ""))):
            raw[role] = _role(role, default, raw.get(role, {}), name)
        return vf.load_environment(vf.resolve_env_config(raw))
    except ModuleNotFoundError as error:
        raise ConfigError([f"rollout.environment.kind: {error}"]) from error
    except ValidationError as error:
        raise ConfigError(
            [f"{_ARGS}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError([f"rollout.environment.kind: verifiers cannot load {name!r}: {error}"]) from error


def _roles(name: str, env_id: str) -> Iterator[tuple[str, Any]]:
    for role, definition in vf.env_config_type(name, env_id).model_fields.items():
        if isinstance(definition.default, vf.AgentConfig):
            yield role, definition.default


def _role(role: str, default: Any, given: Any, name: str) -> dict[str, Any]:
    settings = dict(given)
    if "sampling" in settings:
        raise ConfigError([f"{_ARGS}.{role}.sampling: is set by rollout.sampling, for trainer and engine; remove it"])
    chosen = {*settings, *default.model_fields_set}
    if "runtime" not in chosen:
        settings["runtime"] = {"type": "subprocess"}
    if "harness" not in chosen and vf.default_harness_id(name) == "bash":
        settings["harness"] = {"id": _HARNESS}
    return settings


def _prompts(taskset: Any, train_size: int | None, eval_size: int) -> dict[Split, list[Prompt]]:
    limit = train_size if taskset.bounded else train_size or PROCEDURAL_TRAIN_SIZE
    try:
        tasks = iter(taskset)
        held_out = [_prompt(task) for task in islice(tasks, eval_size)]
        seen = {prompt.facts["content"] for prompt in held_out}
        rest = (_prompt(task) for task in tasks)
        train = list(islice((prompt for prompt in rest if prompt.facts["content"] not in seen), limit))
    except Exception as error:  # a taskset loads what it likes, from where it likes
        raise SetupError(f"verifiers: the taskset's tasks cannot be loaded: {type(error).__name__}: {error}") from error
    if not train:
        raise ConfigError(
            [f"data.eval_size: {eval_size} held-out tasks leave none of the taskset's {len(held_out)} for training"]
        )
    return {Split.TRAIN: train, Split.EVAL: held_out}


def _prompt(task: Any) -> Prompt:
    content = json.dumps(task.data.model_dump(mode="json", exclude={"idx"}), sort_keys=True)
    return Prompt(f"task-{task.data.idx}", task.data.prompt_text, facts={"task": task, "content": content})


def _register_harness() -> None:
    """Verifiers finds a harness by the name of a module that exports it."""
    plugin = types.ModuleType(_HARNESS, "The chat harness of Penstock, as verifiers looks for it.")
    plugin.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules.setdefault(_HARNESS, plugin)


_register_harness()

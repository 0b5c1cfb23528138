"""The client that answers verifiers' model calls with Penstock's engine.

In verifiers an agent's program (a harness) reaches its model through a server in this process, which asks a client for
each completion. The client here asks the sample's generation handle, so tokens, log-probs and weight versions are the
engine's own.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire

from penstock.errors import EnvironmentFailure, PenstockError, PromptTooLong
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.environments.base import GenerationHandle
from penstock.rollout.environments.turns.conversation import Conversation
from penstock.rollout.environments.turns.tool_calls import parse_tool_calls
from penstock.rollout.prompts import Message

OVERFLOW = "maximum context length"
"""What verifiers' own programs also take as the end of the context."""


@dataclass
class Sample:
    """What the client knows about one sample: its handle, and a conversation for each trace."""

    handle: GenerationHandle
    talks: dict[str, Conversation] = field(default_factory=dict)
    generating: set[str] = field(default_factory=set)
    failure: PenstockError | None = None
    """The error that stopped it; verifiers passes on only its text."""
    out_of_room: bool = False


class EngineClient(vf.Client):  # type: ignore[misc]
    """Answers the model calls of all samples, each through its own handle; a sample is known by its trace's id."""

    def __init__(self) -> None:
        self.samples: dict[str, Sample] = {}

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
            raise vf.ProviderError(f"{OVERFLOW} reached: {error}", status_code=400) from error
        except PenstockError as error:
            sample.failure = error
            raise vf.ProviderError(str(error), status_code=400) from error

    async def _respond(self, sample: Sample, trace: str, dialect: Any, body: dict[str, Any], turn: Any) -> Any:
        if not isinstance(dialect, ChatDialect):
            raise EnvironmentFailure("the environment's program uses another API than chat completions: not supported")
        if trace in sample.generating:
            raise EnvironmentFailure("the environment's program makes concurrent model calls: not supported")
        talk, tools = sample.talks[trace], [tool_to_wire(tool) for tool in turn.tools]
        messages = [_plain(message_to_wire(message)) for message in turn.prompt]
        if talk.generations:
            talk.reply(talk.tail_of(messages), tools)
        else:
            talk.open(messages, tools)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        stop = body.get("stop") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        sample.generating.add(trace)
        try:
            generation = await sample.handle.generate(talk.ids, stop=stop, max_new_tokens=limit)
        finally:
            sample.generating.discard(trace)
        text = _text(generation, sample.handle, stop)
        response = _response(generation, text, bool(tools), len(talk.ids), body["model"])
        talk.add(generation, message_to_wire(response.message))
        return response


def _plain(message: Mapping[str, Any]) -> Message:
    if isinstance(message.get("content"), list):
        raise EnvironmentFailure("the environment shows the model images, or content in parts: not supported")
    return {**message, "content": message.get("content") or ""}


def _text(generation: GenerationResult, handle: GenerationHandle, stop: tuple[str, ...]) -> str:
    """What the model wrote; as the API has it, without a stop string that the program itself asked for."""
    text = handle.decode(generation.token_ids)
    return text.removesuffix(generation.stop_string) if generation.stop_string in stop else text


def _response(generation: GenerationResult, text: str, tools: bool, prompt: int, model: str) -> Any:
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

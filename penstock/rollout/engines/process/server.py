"""The process of an engine, as `EngineProcess` starts it.

It creates the embedded engine that the first call asks for, and serves the calls that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, ClassVar, NoReturn

from penstock.config.sections.model import ModelConfig
from penstock.observe.streams import guarded
from penstock.rollout.engines.base import EngineHealth
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.process.wire import (
    HEARTBEAT_SECONDS,
    EngineState,
    Frame,
    decode_publication,
    decode_request,
    encode_error,
    encode_result,
    read_frame,
)
from penstock.rollout.handle import HFTokenizer
from penstock.weights.hf import load_tokenizer

_STATE_SECONDS = 0.02
"""How often a changed state is reported when no other message carries it."""
_LAST_WORDS_SECONDS = 1.0

Answer = tuple[Any, bytes]
"""A reply's JSON and array."""


class Server:
    """Runs each call in its own task, so calls overlap as they do on an engine in the same process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._engine: EmbeddedEngine | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._told: EngineState | None = None
        self._told_at = 0.0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the other side is gone."""
        telling = asyncio.create_task(self._tell_state())
        while (frame := await read_frame(reader)) is not None:
            number = frame.head["id"]
            if frame.head["call"] == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            task = asyncio.create_task(self._serve_call(frame))
            self._tasks[number] = task
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number))  # type: ignore[misc]
        telling.cancel()
        if self._engine is not None:
            await self._engine.close()

    async def _serve_call(self, frame: Frame) -> None:
        number = frame.head["id"]
        try:
            content, body = await self._calls[frame.head["call"]](self, frame)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            self._send({"id": number, "error": encode_error(error)})
        else:
            self._send({"id": number, "ok": content}, body)

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        self._told, self._told_at = self._state(), time.monotonic()
        self._writer.write(Frame(head | {"state": self._told.encode()}, body).encode())

    def _state(self) -> EngineState:
        if self._engine is None:
            return EngineState(EngineHealth.PAUSED)
        return EngineState(self._engine.health(), self._engine.stats())

    async def _tell_state(self) -> None:
        """Report changes at once, and from time to time also that nothing changed: that is the sign of life."""
        while True:
            await asyncio.sleep(_STATE_SECONDS)
            if time.monotonic() - self._told_at >= HEARTBEAT_SECONDS or self._state() != self._told:
                self._send({})

    @property
    def _served(self) -> EmbeddedEngine:
        assert self._engine is not None, "the first call makes the engine"
        return self._engine

    # The calls

    async def _start(self, frame: Frame) -> Answer:
        # Off the loop, so that the end of the connection is heard while a large model loads.
        self._engine = await asyncio.to_thread(_engine, frame.head)
        return asdict(self._engine.site), b""

    async def _generate(self, frame: Frame) -> Answer:
        request = decode_request(frame.head["request"], frame.body)
        return encode_result(await self._served.generate(request))

    async def _abort(self, frame: Frame) -> Answer:
        await self._served.abort(frame.head["request_ids"])
        return None, b""

    async def _preempt(self, _: Frame) -> Answer:
        await self._served.preempt()
        return None, b""

    async def _pause(self, _: Frame) -> Answer:
        await self._served.pause()
        return None, b""

    async def _resume(self, _: Frame) -> Answer:
        await self._served.resume()
        return None, b""

    async def _prepare(self, frame: Frame) -> Answer:
        await self._served.prepare(decode_publication(frame.head["publication"]))
        return asdict(self._served.site), b""

    async def _apply(self, frame: Frame) -> Answer:
        await self._served.apply(decode_publication(frame.head["publication"]))
        return None, b""

    async def _weight_digests(self, _: Frame) -> Answer:
        return await self._served.weight_digests(), b""

    async def _sleep(self, frame: Frame) -> Answer:
        await self._served.sleep(frame.head["level"])
        return None, b""

    async def _wake(self, _: Frame) -> Answer:
        await self._served.wake()
        return None, b""

    async def _close(self, _: Frame) -> Answer:
        await self._served.close()
        return None, b""

    _calls: ClassVar[dict[str, Callable[[Server, Frame], Awaitable[Answer]]]] = {
        "start": _start,
        "generate": _generate,
        "abort": _abort,
        "preempt": _preempt,
        "pause": _pause,
        "resume": _resume,
        "prepare": _prepare,
        "apply": _apply,
        "weight_digests": _weight_digests,
        "sleep": _sleep,
        "wake": _wake,
        "close": _close,
    }


def _engine(head: dict[str, Any]) -> EmbeddedEngine:
    settings = ModelConfig(**head["model"])
    return EmbeddedEngine.from_pretrained(
        settings, device=head["device"], **head["engine"], texts=lambda: HFTokenizer(load_tokenizer(settings)).texts
    )


async def _main(connection: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=connection))
    await Server(writer).serve(reader)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def main() -> NoReturn:
    """Serve the connection whose descriptor is the process's first argument."""
    # What a library says must not fail or hang with the display of the run.
    sys.stdout, output = guarded(sys.stdout, "stdout")
    sys.stderr, errors = guarded(sys.stderr, "stderr")

    def leave(status: int) -> NoReturn:
        for writer in (output, errors):
            writer.drain(_LAST_WORDS_SECONDS)
        os._exit(status)

    try:
        with asyncio.Runner() as runner:
            runner.run(_main(int(sys.argv[1])))
            leave(0)  # a thread may still be inside a step, or loading a model, that nobody wants
    except BaseException:  # noqa: BLE001 - the process's last message, for any error
        traceback.print_exc()
        leave(1)

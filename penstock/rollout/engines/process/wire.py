"""What crosses between an engine's process and its controller: frames of JSON and plain arrays, never pickles.

A frame is two lengths (4 bytes each, little-endian), a JSON object and an array's bytes.

    controller to engine    {"id": 7, "call": "generate", ...}      and prompt ids
                            {"id": 7, "call": "cancel"}              nobody is waiting for call 7
    engine to controller    {"id": 7, "ok": ..., "state": ...}       and a response's arrays
                            {"id": 7, "error": ..., "state": ...}
                            {"state": ...}                           when it changes, and as a sign of life
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import traceback
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import (
    EngineError,
    PenstockError,
    PromptTooLong,
    RequestAborted,
    SetupError,
    WeightSyncError,
)
from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GeneratedTokens,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from penstock.rollout.engines.embedded.requests import InvalidRequest
from penstock.runtime.memory import MemoryAddress
from penstock.weights.publication import (
    CudaIpcEndpoint,
    Endpoint,
    InProcessEndpoint,
    SharedMemoryEndpoint,
    TensorEntry,
    WeightManifest,
    WeightPublication,
)

HEARTBEAT_SECONDS = 0.5
"""How often an engine's process reports its state even if nothing has changed."""
_LENGTHS = struct.Struct("<II")
_PROMPT, _TOKENS, _LOGPROBS = np.dtype("<i8"), np.dtype("<i4"), np.dtype("<f8")
_ERRORS: dict[str, type[PenstockError]] = {
    error.__name__: error
    for error in (
        EngineError,
        InvalidRequest,
        PromptTooLong,
        RequestAborted,
        SetupError,
        WeightSyncError,
    )
}
"""Errors that arrive with their own type; of any other, only the text arrives."""


@dataclass(frozen=True)
class Frame:
    """One message."""

    head: dict[str, Any]
    body: bytes = b""

    def encode(self) -> bytes:
        """The bytes that cross."""
        head = json.dumps(self.head).encode()
        return _LENGTHS.pack(len(head), len(self.body)) + head + self.body


def receive(connection: socket.socket) -> Frame | None:
    """The next frame of a blocking socket; None when the other side is gone."""
    lengths = _exactly(connection, _LENGTHS.size)
    if lengths is None:
        return None
    head_size, body_size = _LENGTHS.unpack(lengths)
    content = _exactly(connection, head_size + body_size)
    return None if content is None else Frame(json.loads(content[:head_size]), bytes(content[head_size:]))


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view, got = memoryview(content), 0
    while got < size:
        try:
            count = connection.recv_into(view[got:])
        except OSError:
            return None
        if count == 0:
            return None
        got += count
    return content


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame of a stream; None when the other side is gone."""
    try:
        head_size, body_size = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        content = await reader.readexactly(head_size + body_size)
    except (asyncio.IncompleteReadError, OSError):
        return None
    return Frame(json.loads(content[:head_size]), content[head_size:])


@lru_cache(maxsize=64)
def _encode_sampling(sampling: SamplingParams) -> dict[str, Any]:
    return asdict(sampling) | {"stop_token_ids": sorted(sampling.stop_token_ids)}


def encode_request(request: GenerationRequest) -> tuple[dict[str, Any], bytes]:
    """A request's head, and its prompt; the arrays of what was generated already follow it."""
    generated = b""
    head: dict[str, Any] = {
        "request_id": request.request_id,
        "seed": request.seed,
        "group_id": request.group_id,
        "sampling": _encode_sampling(request.sampling),
    }
    if request.generated is not None:
        given = request.generated
        beginning = GenerationResult(
            "", given.token_ids, given.logprobs, given.token_versions, FinishReason.PREEMPTED, kept_ids=given.kept_ids
        )
        head["generated"], generated = encode_result(beginning)
    head["prompt"] = len(request.prompt_ids)
    return head, np.asarray(request.prompt_ids, dtype=_PROMPT).tobytes() + generated


def decode_request(head: dict[str, Any], body: bytes) -> GenerationRequest:
    """The inverse of `encode_request`."""
    asked = head["sampling"]
    sampling = asked | {"stop_token_ids": frozenset(asked["stop_token_ids"]), "stop": tuple(asked["stop"])}
    prompt = np.frombuffer(body, dtype=_PROMPT, count=head["prompt"])
    generated = None
    if "generated" in head:
        given = decode_result(head["generated"], body[prompt.nbytes :])
        generated = GeneratedTokens(given.token_ids, given.logprobs, given.token_versions, given.kept_ids)
    return GenerationRequest(
        head["request_id"],
        tuple(prompt.tolist()),
        SamplingParams(**sampling),
        seed=head["seed"],
        group_id=head["group_id"],
        generated=generated,
    )


def encode_result(result: GenerationResult) -> tuple[dict[str, Any], bytes]:
    """A response's head and its arrays, one after the other: what tokens were drawn from comes last."""
    head = {
        "request_id": result.request_id,
        "finish_reason": result.finish_reason.value,
        "stop_string": result.stop_string,
        "tokens": len(result.token_ids),
        "kept": [len(ids) for ids in result.kept_ids],
    }
    arrays: tuple[NDArray[np.generic], ...] = (
        np.asarray(result.token_ids, dtype=_TOKENS),
        np.asarray(result.token_versions, dtype=_TOKENS),
        np.asarray(result.logprobs, dtype=_LOGPROBS),
        *(ids.astype(_TOKENS) for ids in result.kept_ids),
    )
    return head, b"".join(array.tobytes() for array in arrays)


def decode_result(head: dict[str, Any], body: bytes) -> GenerationResult:
    """The inverse of `encode_result`."""
    count, kept = head["tokens"], head["kept"]
    ids_2T = np.frombuffer(body, dtype=_TOKENS, count=2 * count).reshape(2, count)
    logprobs_T = np.frombuffer(body, dtype=_LOGPROBS, count=count, offset=ids_2T.nbytes)
    ids_K = np.frombuffer(body, dtype=_TOKENS, offset=ids_2T.nbytes + logprobs_T.nbytes)
    return GenerationResult(
        request_id=head["request_id"],
        token_ids=tuple(ids_2T[0].tolist()),
        logprobs=tuple(logprobs_T.tolist()),
        token_versions=tuple(ids_2T[1].tolist()),
        finish_reason=FinishReason(head["finish_reason"]),
        stop_string=head["stop_string"],
        kept_ids=tuple(np.split(ids_K.astype(np.int32), np.cumsum(kept)[:-1])) if kept else (),
    )


_ENDPOINTS: dict[str, type[Endpoint]] = {
    kind.__name__: kind for kind in (InProcessEndpoint, SharedMemoryEndpoint, CudaIpcEndpoint)
}


def encode_publication(publication: WeightPublication) -> dict[str, Any]:
    """Published weights as JSON: what they are and where to read them."""
    endpoints = []
    for endpoint in publication.endpoints:
        fields = asdict(endpoint)
        if isinstance(endpoint, CudaIpcEndpoint):
            fields["handles"] = [handle.hex() for handle in endpoint.handles]
        endpoints.append({"kind": type(endpoint).__name__, **fields})
    return asdict(publication) | {"endpoints": endpoints}


def decode_publication(content: dict[str, Any]) -> WeightPublication:
    """The inverse of `encode_publication`."""
    manifest = content["manifest"]
    entries = tuple(TensorEntry(**entry | {"shape": tuple(entry["shape"])}) for entry in manifest["entries"])
    endpoints = []
    for endpoint in content["endpoints"]:
        fields = {name: value for name, value in endpoint.items() if name != "kind"}
        if "address" in fields:
            fields["address"] = MemoryAddress(**fields["address"])
        if "handles" in fields:
            fields["handles"] = tuple(bytes.fromhex(handle) for handle in fields["handles"])
        endpoints.append(_ENDPOINTS[endpoint["kind"]](**fields))
    return WeightPublication(
        content["version"],
        WeightManifest(entries, tuple(manifest["buckets"])),
        tuple(endpoints),
        content["number"],
    )


@dataclass(frozen=True)
class EngineState:
    """What the controller's side can be asked at any time, as of the last frame."""

    health: EngineHealth
    stats: EngineStats = field(default_factory=EngineStats)

    def encode(self) -> dict[str, Any]:
        """As JSON."""
        return {"health": self.health.value, "stats": vars(self.stats)}

    @classmethod
    def decode(cls, state: dict[str, Any]) -> EngineState:
        """The inverse of `encode`."""
        return cls(EngineHealth(state["health"]), EngineStats(**state["stats"]))


def encode_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON; an unknown one includes where it was raised."""
    name = type(error).__name__
    if name in _ERRORS:
        return {"kind": name, "message": str(error)}
    return {"kind": name, "message": str(error), "trace": "".join(traceback.format_exception(error))}


def decode_error(error: dict[str, Any]) -> PenstockError:
    """The error to raise on the controller's side."""
    known = _ERRORS.get(error["kind"])
    if known is not None:
        return known(error["message"])
    unknown = EngineError(f"{error['kind']}: {error['message']}")
    if "trace" in error:
        unknown.add_note(f"In the engine's process:\n{error['trace']}")
    return unknown

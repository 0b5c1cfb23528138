"""Frames between an engine's process and its controller."""

from __future__ import annotations

import socket
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import EngineError, FailureKind, PromptTooLong
from penstock.rollout.engines.base import (
    EngineHealth,
    EngineStats,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from penstock.rollout.engines.process.wire import (
    EngineState,
    Frame,
    decode_error,
    decode_request,
    decode_result,
    encode_error,
    encode_request,
    encode_result,
    receive,
)

TEXT = st.text(max_size=20)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
REQUESTS = st.builds(
    GenerationRequest,
    TEXT,
    TOKENS.map(tuple),
    st.builds(
        SamplingParams,
        st.integers(1, 10**6),
        temperature=st.floats(0, 10),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 1000),
        stop_token_ids=TOKENS.map(frozenset),
    ),
    seed=st.integers(0, 2**200),
    group_id=TEXT,
)


@st.composite
def results(draw: st.DrawFn) -> GenerationResult:
    tokens = draw(TOKENS)
    exact = st.floats(allow_nan=False)
    return GenerationResult(
        draw(TEXT),
        tuple(tokens),
        tuple(draw(exact) for _ in tokens),
        tuple(draw(st.integers(0, 10**6)) for _ in tokens),
        draw(st.sampled_from(FinishReason)),
        tuple(np.array(draw(TOKENS), dtype=np.int32) for _ in tokens) if draw(st.booleans()) else (),
    )


def crossed(*frames: Frame) -> list[Frame | None]:
    """The frames as the other end of a socket sees them, in small pieces, and what comes after the last."""
    ours, theirs = socket.socketpair()
    content = b"".join(frame.encode() for frame in frames)

    def send() -> None:
        for start in range(0, len(content), 7):
            ours.sendall(content[start : start + 7])
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    received = [receive(theirs) for _ in range(len(frames) + 1)]
    sender.join()
    theirs.close()
    return received


@settings(deadline=None)  # it starts a thread each time
@given(REQUESTS)
def test_a_request_arrives_as_it_was(request: GenerationRequest) -> None:
    head, body = encode_request(request)
    (frame, end) = crossed(Frame(head, body))
    assert frame is not None
    assert end is None
    assert decode_request(frame.head, frame.body) == request


@given(results())
def test_a_response_arrives_to_the_bit(result: GenerationResult) -> None:
    head, body = encode_result(result)
    arrived = decode_result(head, body)
    assert arrived == result
    assert [ids.tolist() for ids in arrived.kept_ids] == [ids.tolist() for ids in result.kept_ids]


def test_a_connection_that_ends_within_a_frame_gives_none() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(Frame({"id": 1}, b"12345678").encode()[:-3])
    ours.close()
    assert receive(theirs) is None
    theirs.close()


def test_state_arrives_as_it_was() -> None:
    state = EngineState(EngineHealth.HEALTHY, EngineStats(running=3, busy_seconds=1.5, extra={"prefills": 2.0}))
    assert EngineState.decode(state.encode()) == state


def test_known_errors_keep_their_class_and_others_their_text_and_trace() -> None:
    known = decode_error(encode_error(PromptTooLong("too long")))
    assert type(known) is PromptTooLong
    assert str(known) == "too long"
    try:
        raise ZeroDivisionError("boom")
    except ZeroDivisionError as error:
        unknown = decode_error(encode_error(error))
    assert type(unknown) is EngineError
    assert unknown.failure_kind is FailureKind.INFRA
    assert str(unknown) == "ZeroDivisionError: boom"
    assert "test_process_wire.py" in unknown.__notes__[0]

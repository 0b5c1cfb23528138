"""Streams over ones that fail or hang: nothing is raised, nobody waits, and the loss is told once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from penstock.observe.queued_writer import QueuedWriter
from penstock.observe.streams import guarded


class FakeSink:
    """Remembers what is written; `gate` holds it up, `error` is raised."""

    def __init__(self, error: Exception | None = None) -> None:
        self.content = b""
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error = error
        self.given_up = 0
        self.taken_back = 0

    def begin(self) -> None:
        return

    def write(self, content: bytes) -> None:
        self.begun.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.content += content

    def detach(self) -> None:
        self.given_up += 1

    def reattach(self) -> None:
        self.taken_back += 1

    def close(self) -> None:
        return


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def told(writer: QueuedWriter) -> tuple[list[str], threading.Event]:
    """Causes that a listener is told, and an event for the first."""
    causes: list[str] = []
    event = threading.Event()

    def listen(cause: str) -> None:
        causes.append(cause)
        event.set()

    writer.when_lost(listen)
    return causes, event


def test_what_is_written_arrives_in_order() -> None:
    sink = FakeSink()
    writer = QueuedWriter(sink, "stdout")
    for number in range(200):
        writer.write(f"{number}\n".encode())
    assert writer.drain(30)
    assert sink.content == "".join(f"{number}\n" for number in range(200)).encode()


def test_the_first_error_loses_the_stream_and_is_told_once() -> None:
    sink = FakeSink(BrokenPipeError(32, "Broken pipe"))
    writer = QueuedWriter(sink, "stdout")
    causes, event = told(writer)
    assert writer.write(b"one\n") == 4
    assert event.wait(30)
    assert writer.write(b"two\n") == 4
    writer.lose("again")
    assert not writer.drain(30)
    assert (causes, sink.given_up) == (["stdout: Broken pipe"], 1)
    later, _ = told(writer)
    assert later == causes


class TestAReaderThatStops:
    @pytest.fixture
    def sink(self) -> FakeSink:
        sink = FakeSink()
        sink.gate.clear()
        return sink

    def test_a_burst_is_cut_and_says_so(self, sink: FakeSink) -> None:
        writer = QueuedWriter(sink, "stdout", capacity=8, clock=FakeClock())
        writer.write(b"step 1\n")
        assert sink.begun.wait(30)
        writer.write(b"step 2\n")
        writer.write(b"step 3\n")
        sink.gate.set()
        writer.drain(30)
        assert sink.content == b"step 1\nstep 2\n[7 bytes are not shown: stdout could not keep up]\n"
        assert writer.cause is None

    def test_it_is_given_up_when_nothing_was_taken_for_long(self, sink: FakeSink) -> None:
        clock = FakeClock()
        writer = QueuedWriter(sink, "stdout", capacity=8, stuck_seconds=10, clock=clock)
        causes, event = told(writer)
        writer.write(b"step 1\n")
        assert sink.begun.wait(30)
        writer.write(b"step 2\n")
        clock.now = 9.0
        writer.write(b"step 3\n")
        assert writer.cause is None
        clock.now = 10.0
        writer.write(b"step 4\n")
        assert event.wait(30)
        assert causes == ["stdout: nobody read it for 10 s"]
        assert not writer.drain(30)
        writer.lose("the run has ended")
        sink.gate.set()
        assert writer.is_lost
        assert causes == ["stdout: nobody read it for 10 s"], "of one loss it is told once"

    def test_it_is_written_to_again_when_it_reads_on_and_says_what_is_missing(self, sink: FakeSink) -> None:
        clock = FakeClock()
        writer = QueuedWriter(sink, "stdout", capacity=8, stuck_seconds=10, clock=clock)
        causes, event = told(writer)
        writer.write(b"step 1\n")
        assert sink.begun.wait(30)
        writer.write(b"step 2\n")
        clock.now = 10.0
        writer.write(b"step 3\n")
        writer.write(b"step 4\n")
        assert event.wait(30)
        assert (sink.given_up, writer.is_lost) == (1, False)
        sink.gate.set()
        with writer._changed:
            assert writer._changed.wait_for(lambda: writer.cause is None and not writer._writing, 30)
        writer.write(b"step 5\n")
        assert writer.drain(30)
        assert sink.content == b"step 1\nstep 5\n[21 bytes are not shown: stdout could not keep up]\n"
        assert (sink.taken_back, len(causes)) == (1, 1)

    def test_the_end_does_not_wait_for_it(self, sink: FakeSink) -> None:
        writer = QueuedWriter(sink, "stdout")
        writer.write(b"step 1\n")
        assert not writer.drain(0.05)
        assert writer.cause is None
        sink.gate.set()
        assert writer.drain(30)


class TestGuarded:
    def test_letters_that_the_encoding_lacks_are_escaped(self) -> None:
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "w", encoding="ascii") as plain:
            stream, writer = guarded(plain, "stdout")
            stream.write("reward ━ \ud800\n")
            assert writer.drain(30)
        assert os.read(read_end, 100) == b"reward \\u2501 \\ud800\n"
        os.close(read_end)

    def test_a_stream_of_another_program_gets_text(self) -> None:
        beneath = io.StringIO()
        stream, writer = guarded(beneath, "stdout")
        stream.write("x" + "ü" * 5000)
        assert writer.drain(30)
        assert beneath.getvalue() == "x" + "ü" * 5000

    def test_one_that_does_more_than_its_descriptor_is_not_passed_by(self) -> None:
        class Tee(io.StringIO):
            def fileno(self) -> int:
                return 1

        tee = Tee()
        stream, writer = guarded(tee, "stdout")
        stream.write("seen\n")
        assert writer.drain(30)
        assert tee.getvalue() == "seen\n"

    def test_a_closed_one_is_lost_from_the_beginning(self) -> None:
        stream, writer = guarded(None, "stderr")
        stream.write("nobody\n")
        assert writer.cause == "stderr was closed when the process began"

    def test_what_was_printed_before_comes_first(self) -> None:
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "w") as plain:
            plain.write("before\n")
            stream, writer = guarded(plain, "stdout")
            stream.write("after\n")
            assert writer.drain(30)
        assert os.read(read_end, 100) == b"before\nafter\n"
        os.close(read_end)

    def test_it_is_guarded_once(self) -> None:
        stream, writer = guarded(io.StringIO(), "stdout")
        assert guarded(stream, "stdout") == (stream, writer)

    def test_it_still_has_a_descriptor_and_bytes(self) -> None:
        read_end, write_end = os.pipe()
        with os.fdopen(write_end, "w") as plain:
            stream, writer = guarded(plain, "stdout")
            stream.buffer.write(b"\xff")  # type: ignore[attr-defined]
            assert writer.drain(30)
            subprocess.run(["echo", "child"], stdout=stream, check=True)
        assert os.read(read_end, 100) == b"\xffchild\n"
        os.close(read_end)

    def test_a_closed_stream_ends_its_thread(self) -> None:
        stream, _ = guarded(io.StringIO(), "a-stream-to-close")
        (thread,) = [each for each in threading.enumerate() if each.name == "a-stream-to-close-writer"]
        stream.close()
        thread.join(30)
        assert not thread.is_alive()

    def test_a_forked_process_writes_too(self) -> None:
        code = (
            "import os, sys\n"
            "from penstock.observe.streams import guarded\n"
            "sys.stdout, writer = guarded(sys.stdout, 'stdout')\n"
            "if os.fork() == 0:\n"
            "    print('child')\n"
            "    os._exit(0)\n"
            "os.wait()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("child\n", "")


def test_a_broken_stdout_leads_nowhere_afterwards() -> None:
    """Also for what does not go through Python's streams, and for Python's own end, which flushes them."""
    code = (
        "import os, sys\n"
        "from penstock.observe.streams import guarded\n"
        "stream, writer = guarded(sys.stdout, 'stdout')\n"
        "print('in a buffer that is full of it' * 100)\n"
        "stream.write('x')\n"
        "writer.drain(30)\n"
        "os.write(1, b'directly')\n"
        "sys.stderr.write(str(writer.cause))\n"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, env=buffered)
    assert (done.returncode, done.stderr) == (0, b"stdout: No space left on device")


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_a_closed_descriptor_is_not_given_to_a_file(closed: tuple[int, ...]) -> None:
    read_end, write_end = os.pipe()
    code = (
        "import os\n"
        "from penstock.observe.sinks import hold_standard_descriptors\n"
        "hold_standard_descriptors()\n"
        f"os.write({write_end}, str(os.open('/dev/null', os.O_RDONLY) > 2).encode())\n"
    )

    def close() -> None:
        for descriptor in closed:
            with suppress(OSError):
                os.close(descriptor)

    subprocess.run([sys.executable, "-c", code], preexec_fn=close, pass_fds=(write_end,), timeout=60)
    assert os.read(read_end, 100) == b"True"
    os.close(read_end)
    os.close(write_end)

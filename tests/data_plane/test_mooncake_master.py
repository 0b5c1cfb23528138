"""A real `mooncake_master`: started, watched and ended, and nobody else's touched."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock.data_plane.adapters.mooncake.master as module
from penstock.data_plane.adapters.mooncake.listening import listening_sockets
from penstock.data_plane.adapters.mooncake.master import MooncakeMaster, find_master
from penstock.errors import SetupError
from tests.data_plane.mooncake_here import needs_mooncake

pytestmark = [needs_mooncake, pytest.mark.long]  # `make test-all` has installed it
LONG = 60.0
_OWNER = """
import sys
from penstock.data_plane.adapters.mooncake.master import MooncakeMaster
master = MooncakeMaster()
print(master.pid, master.port, master.log, flush=True)
sys.stdin.read()
master.close()
"""


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    made = MooncakeMaster()
    yield made
    made.close()


@contextmanager
def owner_process() -> Iterator[tuple[subprocess.Popen[str], int, int, Path]]:
    """A process that owns a master; it closes it and ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pid, port, log = process.stdout.readline().split()
        yield process, int(pid), int(port), Path(log)
    finally:
        process.stdin.close()
        process.wait(LONG)


@contextmanager
def ending(pid: int) -> Iterator[None]:
    """The block ends a process that is not our child; wait until it is gone."""
    handle = os.pidfd_open(pid)  # before its end, after which nobody knows the number
    try:
        yield
        assert select.select([handle], [], [], LONG)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=LONG).close()
    except ConnectionRefusedError:
        return False
    return True


def test_it_answers_on_loopback_only_and_leaves_nothing_behind(master: MooncakeMaster) -> None:
    assert master.address == f"127.0.0.1:{master.port}"
    assert answers(master.port)
    assert {host for host, _ in listening_sockets(master.pid)} == {"127.0.0.1"}
    assert master.log.exists()
    master.close()
    assert not answers(master.port)
    assert not Path(f"/proc/{master.pid}").exists()
    assert not master.log.exists()
    assert master.loss is None
    master.close()


def test_a_log_that_was_named_is_kept(tmp_path: Path) -> None:
    master = MooncakeMaster(log=tmp_path / "master.log")
    master.close()
    assert (tmp_path / "master.log").exists()


def test_two_owners_have_a_master_each_and_one_may_go(master: MooncakeMaster) -> None:
    with owner_process() as (owner, pid, port, log):
        assert (pid, port) != (master.pid, master.port)
        assert answers(port)
        assert owner.stdin is not None
        owner.stdin.close()
        owner.wait(LONG)
        assert not answers(port)
        assert not log.exists()
    assert answers(master.port)
    assert master.loss is None


def test_it_ends_with_an_owner_that_is_killed(master: MooncakeMaster) -> None:
    with owner_process() as (owner, pid, port, log):
        with ending(pid):
            owner.kill()
        assert not answers(port)
        log.unlink()
    assert answers(master.port)


def test_it_outlives_the_thread_that_started_it() -> None:
    made: list[MooncakeMaster] = []
    thread = threading.Thread(target=lambda: made.append(MooncakeMaster()))
    thread.start()
    thread.join()
    (master,) = made
    try:
        # The kernel would have killed it with its thread; a second master takes longer to start than that.
        MooncakeMaster().close()
        assert answers(master.port)
        assert master.loss is None
    finally:
        master.close()


def test_its_death_is_noticed_and_it_can_be_closed() -> None:
    told: list[str] = []
    noticed = threading.Event()

    def on_loss(text: str) -> None:
        told.append(text)
        noticed.set()

    master = MooncakeMaster(on_loss=on_loss)
    os.kill(master.pid, signal.SIGKILL)
    assert noticed.wait(LONG)
    assert told == [f"mooncake_master was ended by SIGKILL; its log is {master.log}"]
    assert master.loss == told[0]
    master.close()
    assert master.log.exists(), "somebody may want to know why"
    master.log.unlink()
    assert len(told) == 1


def test_a_closed_master_is_not_reported_as_lost() -> None:
    told: list[str] = []
    master = MooncakeMaster(on_loss=told.append)
    master.close()
    assert (told, master.loss) == ([], None)


def signals_in(status: Path, line: str) -> set[int]:
    """The signals in one of the masks in a file `status` of /proc."""
    mask = next(each for each in status.read_text().splitlines() if each.startswith(f"{line}:")).split()[1]
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_signals_to_all_processes_of_a_job_do_not_reach_it(master: MooncakeMaster) -> None:
    """It has handlers of its own for the first two, and would end."""
    sent = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    for number in sent:
        os.kill(master.pid, number)
    for thread in Path(f"/proc/{master.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
            assert signals_in(thread / "status", "SigBlk") >= sent
    assert signals_in(Path(f"/proc/{master.pid}/status"), "ShdPnd") >= sent, "they wait for good"
    assert answers(master.port)
    assert master.loss is None


def test_a_port_that_somebody_takes_first_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        real, asked = module.free_port, []

        def first_a_taken_one(host: str) -> int:
            asked.append(host)
            return taken if len(asked) == 1 else real(host)

        monkeypatch.setattr(module, "free_port", first_a_taken_one)
        master = MooncakeMaster()
        try:
            assert master.port != taken
            assert answers(master.port)
        finally:
            master.close()


def test_the_run_bit_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    copied = tmp_path / "mooncake" / "mooncake_master"
    shutil.copy(find_master(), copied)
    copied.chmod(0o644)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    importlib.invalidate_caches()
    assert find_master() == copied
    assert os.access(copied, os.X_OK)


def test_without_one_the_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    logs = folder_of_logs(tmp_path, monkeypatch)
    with pytest.raises(SetupError, match=r"neither in the package mooncake nor on PATH; pip install 'mooncake-"):
        MooncakeMaster()
    assert list(logs.iterdir()) == []


def test_one_that_lacks_a_library_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mooncake_master"
    said = (
        "error while loading shared libraries: libnuma.so.1: cannot open shared object file: No such file or directory"
    )
    program.write_text(f"#!/bin/sh\necho 'mooncake_master: {said}' >&2\nexit 127\n")
    program.chmod(0o755)
    monkeypatch.setattr(module, "find_master", lambda: program)
    logs = folder_of_logs(tmp_path, monkeypatch)
    with pytest.raises(SetupError, match=r"needs the native library libnuma\.so\.1"):
        MooncakeMaster()
    assert list(logs.iterdir()) == []
    with pytest.raises(SetupError):
        MooncakeMaster(log=tmp_path / "named.log")
    assert (tmp_path / "named.log").exists()


def folder_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs lie that nobody named."""
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(logs))
    return logs

"""The process ends when its command has, with its exit code, and with nothing but JSON where that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.programs import SMALLEST_YAML, with_train
from tests.run.displays import full_pipe

ENDED = """
from types import SimpleNamespace
return SimpleNamespace(summary={"steps": 1}, run_dir=Path("runs/x"), stopped_by="max_steps")
"""
SOON = "import penstock.cli.leaving\npenstock.cli.leaving.ORDERLY_SECONDS = 1.0\n"
LEFT_OVER = {
    "thread": "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    "thread pool": (
        "import threading, concurrent.futures\nconcurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait)"
    ),
    "process pool": (
        "import time, concurrent.futures\n"
        "pool = concurrent.futures.ProcessPoolExecutor(1)\n"
        "sys.stderr.write(f'{pool.submit(__import__(\"os\").getpid).result()}')\n"
        "pool.submit(time.sleep, 1000)"
    ),
    "exit handler": "import atexit, threading\natexit.register(threading.Event().wait)",
    "destructor": (
        "import threading\n"
        "class Waits:\n"
        "    def __del__(self, wait=threading.Event().wait):\n"
        "        wait()\n"
        "sys.waits = Waits()"
    ),
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST_YAML)
    return str(path)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class TestLeftOver:
    @pytest.mark.parametrize(
        "what",
        [name if name == "thread pool" else pytest.param(name, marks=pytest.mark.long) for name in sorted(LEFT_OVER)],
    )
    def test_it_does_not_keep_the_process(self, config: str, what: str) -> None:
        command = with_train(f"{SOON}{LEFT_OVER[what]}\n{ENDED}", "train", config, "--json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert json.loads(done.stdout)["stopped_by"] == "max_steps"
        if what == "process pool":
            deadline = time.monotonic() + 30
            while is_alive(int(done.stderr)):
                assert time.monotonic() < deadline, "a process of the pool was left behind"
                time.sleep(0.01)

    @pytest.mark.long
    def test_the_exit_code_is_the_commands(self, config: str) -> None:
        command = with_train(f"{SOON}{LEFT_OVER['thread']}\nraise TooManyDrops('all of them')", "train", config)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (1, "error: the run failed: all of them\n")

    def test_what_ends_in_order_is_let_end(self, config: str, tmp_path: Path) -> None:
        body = (
            "import atexit, concurrent.futures, threading, time\n"
            f"note = lambda name: open({str(tmp_path / 'ended')!r}, 'a').write(name + ' ')\n"
            "atexit.register(note, 'handler')\n"
            "concurrent.futures.ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), note('pool')))\n"
        )
        done = subprocess.run(with_train(body + ENDED, "train", config), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "ended").read_text() == "pool handler "


NOISE = """
import atexit, ctypes, logging, os, subprocess
print("a print")
sys.stdout.write("a write")
sys.stdout.buffer.write(b"bytes")
sys.__stdout__.write("the stream of the beginning")
os.write(1, b"the descriptor")
subprocess.run(["echo", "a child"])
libc = ctypes.CDLL(None)
libc.puts(b"a native library")
atexit.register(print, "an exit handler")
"""


STEPS = 'for step in range(1, 4):\n    json_to.write(\'{"type": "step", "step": %d}\\n\' % step)\n'


class TestNothingButJson:
    def test_whatever_is_printed(self, config: str) -> None:
        done = subprocess.run(
            with_train(NOISE + STEPS + ENDED, "train", config, "--json"), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0
        *steps, result = map(json.loads, done.stdout.splitlines())
        assert steps == [{"type": "step", "step": step} for step in (1, 2, 3)]
        assert (result["type"], result["summary"]) == ("result", {"steps": 1})
        for noise in ("a print", "a write", "bytes", "of the beginning", "the descriptor", "a child", "exit handler"):
            assert noise in done.stderr

    @pytest.mark.long
    def test_where_the_run_fails(self, config: str) -> None:
        done = subprocess.run(
            with_train(f"{NOISE}{STEPS}\nraise TooManyDrops('all')", "train", config, "--json"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        *steps, last = map(json.loads, done.stdout.splitlines())
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert (last["type"], last["error"]["type"]) == ("error", "TooManyDrops")

    @pytest.mark.long
    @pytest.mark.parametrize("in_process", ["true", "false"])
    def test_where_a_module_of_the_users_prints(self, tmp_path: Path, in_process: str) -> None:
        (tmp_path / "loud.py").write_text("print('imported')\ndef reward(prompt, response, answer): return 0.0\n")
        (tmp_path / "data.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
        (tmp_path / "model").mkdir()
        (tmp_path / "run.yaml").write_text(
            "model: {path: model}\ndata: {train_path: data.jsonl}\n"
            f"rollout: {{environment: {{kind: function, import_path: 'loud:reward', in_process: {in_process}}}}}\n"
        )
        (tmp_path / "model" / "config.json").write_text("{}")
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "config", "check", "run.yaml", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert ("imported" in done.stderr) is (in_process == "true")
        assert "ok" in json.loads(done.stdout)

    def test_a_reader_that_takes_nothing_is_not_waited_for_after_a_run(self, config: str) -> None:
        body = f"import penstock.cli.streams\npenstock.cli.streams.DOCUMENT_SECONDS = 0.2\n{ENDED}"
        with full_pipe() as stdout:
            command = with_train(body, "train", config, "--json")
            done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr == "error: the result could not be written to stdout: nobody read it for 0.2 s\n"

    def test_a_reader_that_is_slow_gets_whole_lines_and_the_result(self, config: str) -> None:
        """It takes nothing before the run has ended; more was written than may wait."""
        body = "for step in range(40):\n    json_to.write('\"' + 'x' * 99_997 + '\"\\n')\nsys.stderr.write('written')\n"
        process = subprocess.Popen(
            with_train(body + ENDED, "train", config, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.read(7) == b"written"
        lines = [json.loads(line) for line in process.stdout.read().splitlines()]
        assert process.wait(60) == 0
        process.stdout.close()
        process.stderr.close()
        (left_out,) = [line for line in lines if isinstance(line, dict) and line["type"] == "left_out"]
        assert left_out["bytes"] == (40 - len(lines) + 2) * 100_000
        assert lines[-1]["type"] == "result"


class TestStderr:
    @pytest.mark.parametrize("to", [">&-", ">/dev/full"])
    def test_it_cannot_change_the_exit_code(self, config: str, to: str) -> None:
        command = f'exec "$@" 2{to}'
        arguments = [sys.executable, "-m", "penstock", "config", "show", config, "seeed=1"]
        assert subprocess.run(["bash", "-c", command, "bash", *arguments], timeout=60).returncode == 2

    def test_a_run_does_not_wait_for_its_reader(self, config: str) -> None:
        body = f"import logging\nfor _ in range(50):\n    logging.warning('x' * 100_000)\n{ENDED}"
        with full_pipe() as stderr:
            done = subprocess.run(
                with_train(body, "train", config, "--json"), stdout=subprocess.PIPE, stderr=stderr, timeout=60
            )
        assert done.returncode == 0
        assert json.loads(done.stdout)["stopped_by"] == "max_steps"


def test_a_result_for_people_that_cannot_be_written_is_a_failure_where_it_is_all_there_is(config: str) -> None:
    arguments = [sys.executable, "-m", "penstock", "config", "show", config]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "bug in Penstock" not in done.stderr

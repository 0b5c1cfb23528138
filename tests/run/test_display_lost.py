"""A display that breaks, is closed or is not read: the run goes on to its end, and says so once."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.models import RunConfig
from penstock.rollout.environments.rewards.pool import RewardPool
from penstock.run.run_log import RunLog
from tests.run.conftest import ConfigMaker
from tests.run.displays import CTRL_S, Terminal, causes, check_ended, events, full_pipe, train_command
from tests.support.process_rewards import own_pid
from tests.support.program import LIMIT_SECONDS, Program

pytestmark = pytest.mark.usefixtures("hangups_are_heard")


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, timeout=LIMIT_SECONDS, **options)


class TestStdout:
    def test_a_pipe_that_is_closed_after_the_first_line(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "auto"})
        process = subprocess.Popen(
            train_command(config, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert process.stdout is not None
        assert process.stdout.read(10) == b"setting up"
        process.stdout.close()
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
        assert (process.returncode, errors) == (0, b"")
        check_ended(config)
        assert causes(config) == ["stdout: Broken pipe"]

    @pytest.mark.long
    @pytest.mark.parametrize("mode", ["plain", "table"])
    def test_a_full_disk(self, make_config: ConfigMaker, tmp_path: Path, mode: str) -> None:
        config = make_config(**{"observe.console": mode})
        with open("/dev/full", "wb") as full:
            done = run(train_command(config, tmp_path), stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")
        check_ended(config)
        assert causes(config) == ["stdout: No space left on device"]

    @pytest.mark.long
    @pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
    def test_streams_that_are_closed_when_it_begins(
        self, make_config: ConfigMaker, tmp_path: Path, closed: str
    ) -> None:
        config = make_config(**{"observe.console": "plain"})
        shell = f'exec "$@" {closed}'
        done = run(["bash", "-c", shell, "bash", *train_command(config, tmp_path)], stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")
        check_ended(config)
        assert causes(config) == ["stdout was closed when the process began"]

    @pytest.mark.long
    def test_an_encoding_without_the_letter(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain", "run_dir": str(tmp_path / "Lauf-ä")})
        environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
        done = run(train_command(config, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"Lauf-\\xe4" in done.stdout
        check_ended(config)
        assert causes(config) == []

    @pytest.mark.long
    def test_a_pipe_that_nobody_reads(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain"})
        with full_pipe() as pipe:
            done = run(train_command(config, tmp_path), stdout=pipe, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")
        check_ended(config)
        (cause,) = causes(config)
        assert "nobody read it" in cause

    @pytest.mark.long
    def test_a_reward_that_prints_where_nobody_reads(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        """More than any queue holds, on a stdout and a stderr that are stuck."""
        config = loud_config(make_config, tmp_path)
        with full_pipe() as stdout, full_pipe() as stderr:
            done = run(train_command(config, tmp_path), stdout=stdout, stderr=stderr, cwd=tmp_path)
        assert done.returncode == 0
        check_ended(config)
        assert len(causes(config)) == 1

    @pytest.mark.long
    def test_a_reward_that_prints_to_a_closed_pipe(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = loud_config(make_config, tmp_path)
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = run(train_command(config, tmp_path), stdout=write_end, stderr=write_end, cwd=tmp_path)
        os.close(write_end)
        assert done.returncode == 0
        check_ended(config)
        assert causes(config) == ["stdout: Broken pipe"]


def loud_config(make_config: ConfigMaker, folder: Path) -> RunConfig:
    """One whose reward prints half a megabyte a call."""
    (folder / "loud.py").write_text(
        "import logging, sys\n"
        "def reward(prompt, response, answer):\n"
        "    print('x' * 500_000)\n"
        "    sys.stderr.write('y' * 500_000)\n"
        "    logging.warning('z' * 100_000)\n"
        "    return float(len(response))\n"
    )
    (folder / "data.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(24)))
    return make_config(
        **{
            "observe.console": "table",
            "rollout.environment": {"kind": "function", "import_path": "loud:reward"},
            "data": {"train_path": str(folder / "data.jsonl")},
        }
    )


class TestJson:
    @pytest.mark.long
    def test_a_result_that_cannot_be_written_is_a_failure(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config()
        with open("/dev/full", "wb") as full:
            done = run(train_command(config, tmp_path, "--json"), stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1
        assert done.stderr == b"error: the result could not be written to stdout: No space left on device\n"
        check_ended(config)


class TestTerminal:
    @pytest.mark.parametrize(
        ("mode", "shown"), [("auto", b"step 0/"), pytest.param("plain", b"step 1/", marks=pytest.mark.long)]
    )
    def test_a_run_goes_on_without_the_terminal_it_began_on(
        self, make_config: ConfigMaker, tmp_path: Path, mode: str, shown: bytes
    ) -> None:
        config = make_config(**{"observe.console": mode, "training.max_steps": 20, "data.train_size": 80})
        terminal = Terminal(train_command(config, tmp_path))
        terminal.wait_for(shown)
        terminal.close()
        assert terminal.process.wait(LIMIT_SECONDS) == 0
        check_ended(config)
        assert causes(config) == ["the terminal was closed (SIGHUP)"]

    @pytest.mark.long
    def test_a_file_is_written_on_after_the_terminal_is_gone(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain", "training.max_steps": 20, "data.train_size": 80})
        read_end, write_end = os.pipe()
        terminal = Terminal(train_command(config, tmp_path), stdout=write_end)
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("step 1/"):
                    break
            terminal.close()
            rest = lines.read()
        assert terminal.process.wait(LIMIT_SECONDS) == 0
        check_ended(config)
        assert "step 20/20" in rest
        assert "the terminal was closed (SIGHUP); the run continues" in rest
        assert causes(config) == ["the terminal was closed (SIGHUP)"]

    @pytest.mark.long
    @pytest.mark.parametrize("mode", ["table", "plain"])
    def test_one_that_is_stopped_holds_nothing_up(self, make_config: ConfigMaker, tmp_path: Path, mode: str) -> None:
        config = make_config(**{"observe.console": mode})
        terminal = Terminal(train_command(config, tmp_path))
        terminal.wait_for(b"setting up")
        terminal.type(CTRL_S)
        assert terminal.process.wait(LIMIT_SECONDS) == 0
        terminal.close()
        check_ended(config)
        (cause,) = causes(config)
        assert "nobody read it" in cause

    @pytest.mark.long
    def test_one_that_stops_whoever_prints_in_the_background(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain"})
        shell = 'stty tostop; set -m; "$@" & wait -f $!'
        terminal = Terminal(["bash", "-c", shell, "bash", *train_command(config, tmp_path)])
        assert terminal.process.wait(LIMIT_SECONDS) == 0
        terminal.close()
        check_ended(config)
        assert causes(config) == []

    @pytest.mark.long
    def test_one_that_closes_while_the_run_is_set_up(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain"})
        terminal = Terminal(train_command(config, tmp_path))
        terminal.wait_for(b"setting up")
        terminal.close()
        assert terminal.process.wait(LIMIT_SECONDS) == 0
        check_ended(config)
        assert len(causes(config)) == 1


class TestHangupWithoutTerminal:
    def hung_up(self, command: list[str]) -> tuple[int, str]:
        """In a session without a terminal, with a hangup at its second step; its exit code and further output."""
        with Program(command, start_new_session=True) as run:
            run.until("step 2/")
            run.send(signal.SIGHUP)
            return run.ended()

    @pytest.mark.long
    def test_it_stops_the_run_with_a_checkpoint(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(
            **{"observe.console": "plain", "training.max_steps": 100_000, "data.train_size": 4000, "eval.at_end": False}
        )
        code, rest = self.hung_up(train_command(config, tmp_path))
        assert code == 130, rest
        assert "stopping and saving a checkpoint" in rest
        check_ended(config, "interrupted")

    @pytest.mark.long
    def test_nohup_is_heeded(self, make_config: ConfigMaker, tmp_path: Path) -> None:
        config = make_config(**{"observe.console": "plain", "training.max_steps": 20, "data.train_size": 80})
        code, rest = self.hung_up(["nohup", *train_command(config, tmp_path)])
        assert code == 0, rest
        check_ended(config)
        assert causes(config) == []


class Broken(io.StringIO):
    """A stream without a descriptor, as a notebook has one, that refuses."""

    def write(self, text: str) -> int:
        raise RuntimeError("the kernel is gone")


class Stuck(io.StringIO):
    """One that never comes back."""

    def write(self, text: str) -> int:
        threading.Event().wait()
        return 0


class TestFromPython:
    def test_a_stdout_that_raises(self, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        config = make_config(**{"observe.console": "plain"})
        monkeypatch.setattr(sys, "stdout", Broken())
        assert penstock.train(config).stopped_by == "max_steps"
        check_ended(config)
        assert causes(config) == ["stdout: RuntimeError: the kernel is gone"]
        assert events(config)[0]["event"] == "run_started"

    def test_a_stdout_that_hangs(self, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        config = make_config(**{"observe.console": "plain"})
        monkeypatch.setattr("penstock.observe.display.PATIENCE_SECONDS", 0.1)
        monkeypatch.setattr(sys, "stdout", Stuck())
        assert penstock.train(config).stopped_by == "max_steps"
        check_ended(config)
        assert len(causes(config)) == 1

    def test_a_view_that_cannot_draw_what_it_is_told(
        self, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unreadable(*_: object) -> str:
            raise KeyError("no such metric")

        monkeypatch.setattr("penstock.observe.progress.step_line", unreadable)
        config = make_config(**{"observe.console": "plain"})
        assert penstock.train(config).stopped_by == "max_steps"
        assert causes(config) == ["KeyError: 'no such metric'"]

    def test_the_table_too_where_it_draws_by_itself(
        self, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def unreadable(*_: object) -> str:
            raise KeyError("no such metric")

        monkeypatch.setattr("penstock.observe.progress.step_text", unreadable)
        config = make_config(**{"observe.console": "table"})
        assert penstock.train(config).stopped_by == "max_steps"
        assert causes(config) == ["KeyError: 'no such metric'"]
        assert "Traceback" not in capfd.readouterr().err

    def test_samples_that_cannot_be_kept_are_only_an_event(
        self, make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise ValueError("no such text")

        monkeypatch.setattr("penstock.observe.samples.SampleLog.write", refuse)
        config = make_config()
        assert penstock.train(config).stopped_by == "max_steps"
        assert "samples_not_kept" in [event["event"] for event in events(config)]


def test_a_stuck_call_in_a_thread_does_not_keep_train_from_returning(
    make_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    start = RunLog.start

    async def start_with_a_stuck_call(self: RunLog) -> None:
        asyncio.get_running_loop().run_in_executor(None, released.wait)
        await start(self)

    monkeypatch.setattr(RunLog, "start", start_with_a_stuck_call)
    results: list[Any] = []
    training = threading.Thread(target=lambda: results.append(penstock.train(make_config())), daemon=True)
    training.start()
    training.join(LIMIT_SECONDS)
    released.set()
    assert [result.stopped_by for result in results] == ["max_steps"]
    assert json.loads((results[0].run_dir / "summary.json").read_text())["stopped_by"] == "max_steps"


def test_a_closed_terminal_costs_no_reward_process() -> None:
    async def score_twice() -> tuple[int, int]:
        pool = RewardPool(1, timeout_seconds=LIMIT_SECONDS)
        try:
            first = await pool.score(own_pid)
            os.kill(first, signal.SIGHUP)
            return first, await pool.score(own_pid)
        finally:
            await pool.close()

    first, second = asyncio.run(score_twice())
    assert first == second

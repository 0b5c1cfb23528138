"""`make demo-processes`, as a person runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support.processes import marked, wait_until_none

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 1500.0


class Demo:
    """The command in a folder of its own, with everything installed already."""

    def __init__(self, folder: Path, *settings: str) -> None:
        (folder / "examples").symlink_to(ROOT / "examples")
        self.mark = f"PENSTOCK_TEST={uuid.uuid4()}"
        self.run_dir = folder / "runs" / "demo-processes"
        self._output = folder / "output.txt"
        name, _, value = self.mark.partition("=")
        command = ["make", "-f", str(ROOT / "Makefile"), "-o", "install", f"PY={sys.executable}", "demo-processes"]
        if settings:
            command.append(f"SET={' '.join(settings)}")
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Until it has printed this."""
        end = time.monotonic() + END_SECONDS
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.02)

    def end(self) -> int:
        """Its exit status; nothing may be left of it."""
        try:
            return self.process.wait(END_SECONDS)
        finally:
            for pid in marked(self.mark) if self.process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            wait_until_none(self.mark)


@pytest.mark.timeout(1800)
def test_it_learns_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    demo = Demo(tmp_path)
    demo.wait_for("step 1/300")
    processes = marked(demo.mark)
    assert demo.end() == 0, demo.output
    assert len(processes) >= 1 + 1 + 2 + 1, "make, the run, two engines and a trainer"
    assert set(os.listdir("/dev/shm")) <= shared
    rewards = re.search(r"Held-out prompts, greedy +(\d\.\d\d) at the start, (\d\.\d\d) at the end", demo.output)
    assert rewards is not None
    assert float(rewards[2]) > float(rewards[1]) + 0.1
    assert "Training                     300 steps" in demo.output
    assert "Warning" not in demo.output
    assert "Traceback" not in demo.output
    summary = json.loads((demo.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "max_steps"
    last = json.loads((demo.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-2])
    assert {f"rollout/engine/embedded-{rank}/tokens_s" for rank in (0, 1)} <= last.keys()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["setting up", "step 2/300"])
def test_ctrl_c_ends_it_says_how_to_resume_and_leaves_nothing(tmp_path: Path, moment: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    demo = Demo(tmp_path, "data.eval_size=20")
    demo.wait_for(moment)
    os.killpg(demo.process.pid, signal.SIGINT)  # as a terminal does: to make and to the run
    demo.end()
    assert set(os.listdir("/dev/shm")) <= shared
    assert f"Resume with: .venv/bin/penstock resume {demo.run_dir}" in demo.output
    assert "Traceback" not in demo.output
    summary = json.loads((demo.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["stopped_by"] == "interrupted"

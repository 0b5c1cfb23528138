"""The command line as users meet it: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SMALLEST_YAML = """\
model: {path: some/model}
rollout:
  environment: {kind: "reasoning_gym:chain_sum"}
"""

_WITH_TRAIN = """
import signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
from pathlib import Path
from penstock.errors import *
module = types.ModuleType("penstock.run.train")
def train(config, *, from_scratch, json_to):
{body}
module.train = train
sys.modules["penstock.run.train"] = module
sys.argv = ["penstock", *sys.argv[1:]]
from penstock.cli.main import main
main()
"""


def penstock(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `penstock` with these arguments."""
    return subprocess.run(
        [sys.executable, "-c", "from penstock.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
    )


def with_train(body: str, *arguments: str) -> list[str]:
    """The command of a `penstock` whose training is `body`."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return [sys.executable, "-c", _WITH_TRAIN.format(body=indented), *arguments]

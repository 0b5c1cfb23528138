"""`import penstock` and `penstock --help` are quick and bring no torch along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_MEASURE = """
import json, sys, time
started = time.process_time()
{code}
seconds = time.process_time() - started
print()
print(json.dumps({{"seconds": seconds, "heavy": sorted({{"torch", "transformers", "ray"}} & set(sys.modules))}}))
"""
_HELP = """
from penstock.cli.main import app
try:
    app(["--help"])
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import penstock", 0.3),
        ("from penstock.config.reading.loading import load_config", 1.0),
        (_HELP, 0.5),
    ],
    ids=["import penstock", "load_config", "penstock --help"],
)
def test_is_quick_and_without_torch(code: str, limit: float) -> None:
    # Processor time, the best of several: what is asked is what the code costs, not how busy the machine is.
    best = float("inf")
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE.format(code=code)], capture_output=True, text=True, check=True, timeout=60
        )
        measured = json.loads(done.stdout.splitlines()[-1])
        assert measured["heavy"] == []
        best = min(best, measured["seconds"])
        if best < limit:
            break
    assert best < limit

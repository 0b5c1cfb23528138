"""The tools demo: a tiny model learns, by reinforcement, to use a calculator instead of guessing.

Run it with `make demo-tools`. It writes to `runs/tools` and `runs/tools-model`, and starts from nothing every time.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "demo"))

from demo import run_demo  # noqa: E402 - of the first demo; it also tells idle threads how to wait
from warm_start import make_tools_model  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_demo(HERE, make_tools_model))

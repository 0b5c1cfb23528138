"""The engine's GPU kernels where there is no GPU: the tests of `tests/gpu` under Triton's interpreter."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TESTS = ("tests/gpu/test_kernels.py", "tests/gpu/test_kernel_engine.py")
_LIMIT = 600


def why_not() -> str | None:
    """Why the interpreter cannot run here; None where it can."""
    if torch.cuda.is_available():
        return "these tests run compiled, on the GPU"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "needs Triton, which is not installed: make test-all installs it"
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0" and np.lib.NumpyVersion(triton) < "3.7.0":
        return f"the interpreter of Triton {triton} does not work with numpy {np.__version__}; it needs Triton 3.7"
    return None


@pytest.mark.long
@pytest.mark.timeout(_LIMIT)
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_the_kernels_pass_their_tests_when_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *TESTS],
        env={**os.environ, "TRITON_INTERPRET": "1"},  # read when Triton is first imported, so in a process of its own
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

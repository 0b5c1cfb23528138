"""A model without memory for its weights, built in a process of its own to be asked for its parameters.

The helper imports transformers' modelling code so that the process that asks need not; it ends with its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from penstock.errors import SetupError

if TYPE_CHECKING:
    from penstock.config.sections.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]
_LIMIT_SECONDS = 120.0


def ask_meta_model(config: ModelConfig) -> tuple[Shapes, dict[str, str]]:
    """Shapes of the parameters by name, tied ones once; and the names that are tied to one of them."""
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"model.path: {config.path!r} was not described within {_LIMIT_SECONDS:g} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(
            f"model.path: a causal language model could not be loaded from {config.path!r}: {reason[:300]}"
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    return {name: tuple(shape) for name, shape in answer["shapes"].items()}, answer["tied"]


def _describe() -> None:
    """Answer the question on standard input."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from penstock.config.sections.model import ModelConfig
    from penstock.weights.hf import local_folder

    config = ModelConfig.model_validate_json(sys.stdin.read())
    trust = config.trust_remote_code
    settings = AutoConfig.from_pretrained(local_folder(config), trust_remote_code=trust, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=trust)
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: own[id(parameter)] for name, parameter in every if own[id(parameter)] != name}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    print(json.dumps({"shapes": shapes, "tied": tied}))  # noqa: T201 - the answer


if __name__ == "__main__":
    _describe()

"""How an engine decodes: the plain way, or with its own kernels and CUDA graphs."""

from __future__ import annotations

import logging
from typing import Any, Literal

from penstock.errors import SetupError
from penstock.rollout.engines.embedded.device.support import NO_TRITON, build_decoder, why_not
from penstock.rollout.engines.embedded.runner import ModelRunner
from penstock.rollout.engines.embedded.scheduler import Scheduler

_log = logging.getLogger(__name__)

Decoding = Literal["auto", "plain", "kernels"]
"""`auto`: with kernels and CUDA graphs if the model is on a GPU and fits, else plain. `plain`: the model's own forward,
or a lean one of the same operations. `kernels`: without graphs, for debugging them; with TRITON_INTERPRET=1 in the
environment also on a CPU, slowly."""


def make_scheduler(
    model: Any, *, name: str, slots: int, max_model_len: int, deterministic: bool, version: int, decoding: Decoding
) -> Scheduler:
    """The scheduler of an engine, with its runner below it."""
    if decoding not in ("auto", "plain", "kernels"):
        raise SetupError(f"engine {name}: decoding is 'auto', 'plain' or 'kernels', not {decoding!r}")
    device = model.get_output_embeddings().weight.device
    reason = "not asked for" if decoding == "plain" else why_not(model, max_model_len)
    if decoding == "kernels" and reason is not None:
        raise SetupError(f"engine {name}: decoding by kernels does not work here: {reason}")
    by_kernels = reason is None and (device.type == "cuda" or decoding == "kernels")
    runner = ModelRunner(
        model, slots=slots, max_model_len=max_model_len, deterministic=deterministic, use_fused=not by_kernels
    )
    if not by_kernels:
        if device.type == "cuda" and reason == NO_TRITON:
            _log.warning("engine %s decodes without CUDA graphs, which is slow: %s", name, reason)
        return Scheduler(runner, version)
    try:
        decoder = build_decoder(runner, graphs=decoding == "auto")
    except Exception as error:
        # Compilers fail in many ways. If kernels were requested by name, that is an error; else decode the plain way.
        if decoding == "kernels":
            raise SetupError(f"engine {name}: decoding by kernels does not work here: {error}") from error
        _log.warning("engine %s decodes without CUDA graphs, which is slow", name, exc_info=True)
        runner.allow_fused()
        return Scheduler(runner, version)
    from penstock.rollout.engines.embedded.device.scheduler import PipelinedScheduler

    return PipelinedScheduler(runner, version, decoder)

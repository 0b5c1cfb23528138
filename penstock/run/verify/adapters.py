"""How large a run's adapters are, before any weight is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.config.models import RunConfig
from penstock.config.sections.model import ModelConfig
from penstock.runtime.workers import Placement, WorkerKind, WorkerSpec, start
from penstock.weights.hf import local_folder
from penstock.weights.lora import ADAPTER_FILE, attach_lora

_FLOAT32 = 4
_ASK_SECONDS = 120.0
"""How long another process may take to say how large new adapters are."""


def model_settings(model: ModelConfig) -> Any:
    """The model's configuration."""
    from transformers import AutoConfig

    trust = model.trust_remote_code
    return AutoConfig.from_pretrained(local_folder(model), trust_remote_code=trust, local_files_only=True)


def itemsize(model: ModelConfig) -> int:
    """Bytes of one number of the model's weights."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype.itemsize


def adapter_sizes(config: RunConfig) -> list[tuple[int, int]]:
    """Numbers of each adapter tensor, and the size of one."""
    lora = config.model.lora
    assert lora is not None, "there are adapters"
    if lora.path is None:
        return _sizes_elsewhere(config.model) if config.runtime.trainer_process else NewAdapters(config.model).sizes()
    from safetensors import safe_open

    with safe_open(Path(lora.path) / ADAPTER_FILE, "pt") as file:
        names = list(file.keys())
        return [(torch.Size(file.get_slice(name).get_shape()).numel(), _FLOAT32) for name in names]


class NewAdapters:
    """What `model.lora` adds to a model, found by adding it to one without memory for its weights."""

    def __init__(self, model: ModelConfig) -> None:
        from transformers import AutoModelForCausalLM

        assert model.lora is not None, "there are adapters to be added"
        trust, dtype = model.trust_remote_code, getattr(torch, model.dtype)
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(model_settings(model), dtype=dtype, trust_remote_code=trust)
        self._adapted = attach_lora(plain, model.lora)

    def sizes(self) -> list[tuple[int, int]]:
        """Numbers of each tensor, and the size of one."""
        return [(each.numel(), each.itemsize) for each in self._adapted.parameters() if each.requires_grad]


def _sizes_elsewhere(model: ModelConfig) -> list[tuple[int, int]]:
    """The same, found by a process that ends with its answer: this one is to have no code of models."""
    spec = WorkerSpec(f"{__name__}:NewAdapters", {"model": model})
    worker = start(spec, Placement(WorkerKind.PROCESS, "memory estimate"))
    try:
        return [(int(count), int(size)) for count, size in worker.call_blocking("sizes", seconds=_ASK_SECONDS)]
    finally:
        worker.kill()

"""A trainer's checkpoint: weights as Hugging Face has them, optimizer and RNG as safetensors, numbers as JSON.

Nothing is pickled. Layout of the folder:

    config.json, model*.safetensors …    what `save_pretrained` writes; any transformers model loader reads it
    adapter/                             with LoRA: the adapter as peft saves it; the weights above are merged then
    trainer_state.json                   `TrainerState`
    trainer/optimizer.safetensors        moments (and master copies) by parameter name
    trainer/rng.safetensors              torch's CPU and CUDA generators

Optimizer tensors have their own folder because engines read every safetensors file next to `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import SetupError
from penstock.runtime.wire.crossing import crosses
from penstock.training.backends.local.optimizer import PolicyOptimizer
from penstock.weights.lora import LoraAdapter

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = Path("trainer") / "optimizer.safetensors"
RNG_FILE = Path("trainer") / "rng.safetensors"
ADAPTER_FOLDER = "adapter"
_FORMAT = 1


@crosses
@dataclass(frozen=True)
class TrainerState:
    """The numbers of a trainer."""

    version: int
    updates: int
    """Optimizer steps made; sets the learning-rate schedule's place."""
    next_learning_rate: float
    """For people; loading recomputes it from the settings."""
    step_counts: dict[str, int]
    """AdamW's count per parameter."""
    format: int = _FORMAT


@dataclass(frozen=True)
class LocalSnapshot:
    """A trainer as it was at one moment, in its own memory: it can be written while training continues."""

    model: Any
    """For its configuration and the names of its files; its weights are not read."""
    weights: dict[str, Tensor]
    adapter: dict[str, Tensor]
    """With LoRA: the adapter's own tensors; `weights` are merged then."""
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    state: TrainerState
    bytes_to_come: int = 0
    """Bytes of moments that the optimizer does not have yet."""

    @classmethod
    def of(cls, model: Any, optimizer: PolicyOptimizer, version: int) -> LocalSnapshot:
        """Copy everything that a step changes."""
        lora = LoraAdapter.of(model)
        weights, adapter = (_copied(model.state_dict()), {}) if lora is None else lora.snapshot()
        state = TrainerState(version, optimizer.updates, optimizer.next_learning_rate, optimizer.step_counts())
        tensors = _copied(optimizer.state_tensors())
        return cls(model, weights, adapter, tensors, _rng_state(), state, optimizer.bytes_to_come())

    def write(self, folder: Path) -> None:
        """Write a checkpoint into an existing folder.

        An adapted model is written twice: merged, for users who want a model, and as the adapter, to resume from.
        """
        lora = LoraAdapter.of(self.model)
        if lora is None:
            self.model.save_pretrained(folder, state_dict=self.weights)
        else:
            lora.save_merged(folder, self.weights)
            lora.save(folder / ADAPTER_FOLDER, self.adapter)
        (folder / "trainer").mkdir(exist_ok=True)
        save_file(self.optimizer, folder / OPTIMIZER_FILE)
        save_file(self.rng, folder / RNG_FILE)
        (folder / STATE_FILE).write_text(json.dumps(asdict(self.state), indent=1) + "\n")


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU; names that share a tensor share its copy."""

    def place(tensor: Tensor) -> tuple[object, ...]:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    different = {place(tensor): tensor for tensor in tensors.values()}
    copies = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in different.items()}
    return {name: copies[place(tensor)] for name, tensor in tensors.items()}


def load_trainer(folder: Path, model: Any, optimizer: PolicyOptimizer) -> TrainerState:
    """Read a checkpoint back, bit for bit. Everything is checked before anything is changed."""
    state = _read_state(folder)
    tensors, rng = _read_tensors(folder / OPTIMIZER_FILE), _read_tensors(folder / RNG_FILE)
    loaded, found = _read_weights(folder, model)
    problems = sorted(found) + sorted(optimizer.problems(tensors, state.step_counts))
    if problems:
        raise SetupError(f"checkpoint {folder} does not belong to this model: " + "; ".join(problems[:5]))
    if (adapter := LoraAdapter.of(model)) is not None:
        adapter.load(loaded)
    else:
        model.load_state_dict(loaded)
    optimizer.load(tensors, state.step_counts, state.updates)
    _restore_rng(rng)
    return state


def _read_weights(folder: Path, model: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The trained tensors of a checkpoint, and the reasons why they do not fit this model."""
    adapter = LoraAdapter.of(model)
    if adapter is not None:
        return adapter.read(folder / ADAPTER_FOLDER)
    # transformers may rename and merge tensors between file and module, so it reads its own files.
    try:
        saved, info = type(model).from_pretrained(
            folder, dtype=model.dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SetupError(f"checkpoint {folder}: the weights cannot be read ({error})") from error
    loaded: dict[str, Tensor] = saved.state_dict()
    own = model.state_dict()
    missing = [f"weight {name} is missing from the file" for name in info["missing_keys"]]
    return loaded, missing + [
        f"weight {name} differs in name or shape"
        for name in own.keys() | loaded.keys()
        if name not in own or name not in loaded or own[name].shape != loaded[name].shape
    ]


def _read_state(folder: Path) -> TrainerState:
    try:
        state = TrainerState(**json.loads((folder / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(f"checkpoint {folder}: {STATE_FILE} cannot be read ({error})") from error
    if state.format != _FORMAT:
        raise SetupError(f"checkpoint {folder}: format {state.format} was written by another version of Penstock")
    return state


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise SetupError(f"checkpoint: {path} is missing")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise SetupError(f"checkpoint: {path} cannot be read ({error})") from error
    return tensors


def _rng_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_rng(states: dict[str, Tensor]) -> None:
    """Generators that were not saved, or whose device this machine lacks, are left unchanged."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)

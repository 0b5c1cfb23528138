"""Low-rank adapters (LoRA) on a frozen model: the one place that knows peft."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import SetupError
from penstock.weights.pickles import refuse_pickled_weights

if TYPE_CHECKING:
    from penstock.config.sections.model import LoraConfig

ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_NAME = "default"
_SHOWN = 12
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (True, False, "gaussian"),
}
"""Settings of a saved adapter that must have one of these values: others change more than `W + scale * B @ A`, or
rewrite `W` when they are loaded."""
_SAME = {"r": "rank", "lora_alpha": "alpha"}
"""Settings that must be those of a checkpoint, by their names in peft and in `model.lora`."""


class LoraAdapter:
    """A model whose matrices `W` act as `W + scale * B @ A`, with `W` frozen and `A` and `B` trained.

    `peft_model` is what a trainer receives; `model` is the Hugging Face model inside, with the adapters in its layers.
    For everyone else the weights are those of a plain model: `merged_weights` gives them under their plain names.

    Invariants: the base weights are never written before `merge`; `_base` (and `_buffers`) holds the tensors of the
    model before the adapters were attached, so neither names nor readers in other threads depend on how peft wraps
    layers.
    """

    def __init__(self, peft_model: Any, base: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        self.peft_model = peft_model
        self.model: Any = peft_model.get_base_model()
        self._base, self._buffers = base, buffers
        self._layers = {id(_adapted_parameter(layer)): layer for layer in _lora_layers(self.model)}
        peft_model.penstock_adapter = self

    @staticmethod
    def of(model: Any) -> LoraAdapter | None:
        """The adapter of a model that `attach_lora` made; None for a plain model."""
        adapter: LoraAdapter | None = getattr(model, "penstock_adapter", None)
        return adapter

    @property
    def adapted(self) -> list[str]:
        """Plain names of the weights that have an adapter."""
        return [name for name, parameter in self._base.items() if id(parameter) in self._layers]

    def base_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights without their adapters; names, shapes and dtypes are those of `merged_weights`."""
        yield from self._base.items()

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the equivalent plain model, tied ones once; one merged matrix exists at a time."""
        for name, parameter in self._base.items():
            yield name, self._merged(parameter)

    def _merged(self, parameter: nn.Parameter) -> Tensor:
        layer = self._layers.get(id(parameter))
        if layer is None:
            return parameter.detach()
        with torch.no_grad():
            delta = layer.get_delta_weight(_NAME)
            merged: Tensor = delta.add_(parameter).to(parameter.dtype)
        return merged

    def merge(self) -> None:
        """Write the merged matrices over the base weights, which ends what this adapter is for."""
        with torch.no_grad():
            for parameter in self._base.values():
                if id(parameter) in self._layers:
                    parameter.copy_(self._merged(parameter))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is the base model."""
        with self.peft_model.disable_adapter():
            yield

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies in CPU memory of the equivalent plain model's tensors and of the adapter's tensors.

        The frozen base weights, which nobody writes, are not copied.
        """
        merged = {
            name: self._merged(parameter).cpu() if id(parameter) in self._layers else parameter.detach()
            for name, parameter in self._base.items()
        }
        trained = {name: p.detach() for name, p in self.peft_model.named_parameters() if p.requires_grad}
        return merged | self._buffers, {name: p.to("cpu", copy=True) for name, p in trained.items()}

    def save(self, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
        """Write the adapter, current or from a snapshot, as peft does: its tensors and its configuration."""
        self.peft_model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty template that peft adds

    def save_merged(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write the equivalent plain model of a snapshot."""
        self.model.save_pretrained(folder, state_dict=tensors)

    def read(self, folder: Path) -> tuple[dict[str, Tensor], list[str]]:
        """A saved adapter's tensors, and the reasons why they do not fit this adapter."""
        from safetensors.torch import load_file

        saved, config = _adapter_settings(folder), self.peft_model.peft_config[_NAME]
        problems = [
            f"model.lora.{ours} was {saved.get(theirs)}, and is {getattr(config, theirs)} here"
            for theirs, ours in _SAME.items()
            if saved.get(theirs) != getattr(config, theirs)
        ]
        if not (folder / ADAPTER_FILE).is_file():
            problems.append(f"{folder / ADAPTER_FILE} is missing")
        if problems:
            return {}, problems
        tensors: dict[str, Tensor] = load_file(folder / ADAPTER_FILE)
        own = require_peft().get_peft_model_state_dict(self.peft_model, save_embedding_layers=False)
        return tensors, [
            f"adapter tensor {name} differs in name or shape"
            for name in own.keys() | tensors.keys()
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape
        ]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors that `read` found no problem with."""
        require_peft().set_peft_model_state_dict(self.peft_model, tensors)


def attach_lora(model: Any, config: LoraConfig, *, seed: int = 0) -> Any:
    """Freeze the model, attach adapters to its layers, and return the peft model for the trainer.

    A fresh adapter changes nothing yet: `A` is drawn from `seed`, `B` is zero.
    """
    peft = require_peft()
    state = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}
    base = dict(model.named_parameters())
    try:
        with warnings.catch_warnings():
            # For fused experts, peft adds its own settings and then warns about them.
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match", category=RuntimeWarning)
            peft_model = _adapt(peft, model, config, seed)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        key = "model.lora" if config.path is None else f"model.lora.path: {config.path!r}"
        raise SetupError(f"{key} does not fit {type(model).__name__}: {error}") from error
    return LoraAdapter(peft_model, base, buffers).peft_model.eval()


def _adapt(peft: Any, model: Any, config: LoraConfig, seed: int) -> Any:
    if config.path is not None:
        _check_start(Path(config.path))
        with warnings.catch_warnings():
            # peft only warns if tensors are missing; here they are an error.
            warnings.filterwarnings("ignore", message="Found missing adapter keys")
            peft_model = peft.PeftModel.from_pretrained(model, config.path, is_trainable=True)
        _check_fits(peft, peft_model, Path(config.path))
        return peft_model
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_checked_targets(model, config.target_modules),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return peft.get_peft_model(model, settings)


def check_adapter_folder(folder: Path) -> None:
    """Raise `SetupError` if a folder holds no adapter, or a pickled one."""
    _adapter_settings(folder)
    refuse_pickled_weights(folder, "model.lora.path")
    if not (folder / ADAPTER_FILE).is_file():
        raise SetupError(f"model.lora.path: {str(folder)!r} holds no adapter: {ADAPTER_FILE} is missing")


def require_peft() -> Any:
    """The peft package."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise SetupError(
            f"model.lora: needs the peft package, which cannot be imported ({error}); pip install 'peft>=0.21'"
        ) from error


def merge_lora(model: Any) -> Any:
    """The equivalent plain model, in the memory of the adapted one, which nobody may use any more."""
    adapter = LoraAdapter.of(model)
    assert adapter is not None, "attach_lora makes adapted models"
    adapter.merge()
    return adapter.peft_model.unload()


def _lora_layers(model: nn.Module) -> list[Any]:
    kind = require_peft().tuners.lora.LoraLayer
    return [module for module in model.modules() if isinstance(module, kind)]


def _adapted_parameter(layer: Any) -> nn.Parameter:
    """The base weight that an adapter layer belongs to: a linear layer's, or a named one of a module of experts."""
    parameter = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _checked_targets(model: Any, targets: Sequence[str]) -> str | list[str]:
    """The targets as peft wants them; every name must match layers that can have an adapter."""
    if isinstance(targets, str):
        return targets
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in tied}
    for target in targets:
        matched = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
        if any(model.get_submodule(name) in tied for name in matched):
            raise SetupError(
                f"model.lora.target_modules: {target!r} is an embedding or the head, which cannot be adapted"
            )
        if not matched or any(name not in linear for name in matched):
            candidates = sorted({name.rpartition(".")[2] for name in linear})
            what = "names no layer" if not matched else "is not a linear layer"
            raise SetupError(
                f"model.lora.target_modules: {target!r} {what} of {type(model).__name__}; there are "
                f"{', '.join(candidates[:_SHOWN])}, or use all-linear"
            )
    return list(targets)


def _adapter_settings(folder: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"model.lora.path: {str(folder)!r} holds no adapter: {CONFIG_FILE} cannot be read ({error})"
        ) from error
    return settings


def _check_fits(peft: Any, peft_model: Any, folder: Path) -> None:
    """Every tensor of the saved adapter is one of the model's adapters, and vice versa."""
    from safetensors import safe_open

    own = peft.get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    with safe_open(folder / ADAPTER_FILE, framework="pt") as saved:
        shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118 - no mapping
    wrong = sorted(
        name for name in own.keys() | shapes.keys() if name not in own or shapes.get(name) != tuple(own[name].shape)
    )
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise SetupError(
            f"model.lora.path: {str(folder)!r} does not fit {type(peft_model.get_base_model()).__name__}: "
            f"{', '.join(wrong[:3])}{more} are missing, too many or of another shape"
        )


def _check_start(folder: Path) -> None:
    """An adapter to start from must be a plain LoRA one."""
    check_adapter_folder(folder)
    settings = _adapter_settings(folder)
    odd = [name for name, values in _PLAIN.items() if name in settings and settings[name] not in values]
    if settings.get("peft_type") != "LORA":
        raise SetupError(
            f"model.lora.path: {str(folder)!r} is an adapter of type {settings.get('peft_type')}, not LORA"
        )
    if odd:
        raise SetupError(f"model.lora.path: {str(folder)!r} sets {', '.join(odd)}; only plain LoRA can be trained here")

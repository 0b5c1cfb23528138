"""What is known about a model without loading it: `ModelFacts`, from its configuration and its files' headers.

The controller's process reads facts and never a module: no weights are loaded, no GPU is touched, and none of
transformers' modelling code is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SetupError
from penstock.runtime.wire.crossing import crosses
from penstock.weights.headers import stored_tensors
from penstock.weights.hf import LOADING_ERRORS, local_folder, not_loadable
from penstock.weights.logits import LogitTransform
from penstock.weights.model_files import longest_context
from penstock.weights.stored_names import loaded_shapes

if TYPE_CHECKING:
    from penstock.config.sections.model import ModelConfig

HEAD = "lm_head"
"""What transformers calls the output projection of its causal language models."""
_EXPERT = re.compile(r"\.layers\.(\d+)\..*\bexperts\b")
_ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@crosses
@dataclass(frozen=True)
class ParameterFacts:
    """One parameter of the loaded model, under its Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return self.count * _ITEM_SIZES[self.dtype]


@crosses
@dataclass(frozen=True)
class ExpertFacts:
    """The experts of a mixture-of-experts model."""

    layers: tuple[int, ...]
    """Layers that have a router and experts."""
    experts: int
    """Of each such layer."""
    top_k: int
    """How many a token goes to."""


@crosses
@dataclass(frozen=True)
class HeadFacts:
    """How the last hidden state becomes logits."""

    transform: LogitTransform
    has_bias: bool


@crosses
@dataclass(frozen=True)
class LayerFacts:
    """The sizes of the decoder's layers."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dimension: int


@crosses
@dataclass(frozen=True)
class ModelFacts:
    """A causal language model as a worker will load it, in plain values.

    With `model.lora` these are the facts of the plain model: adapters belong to the trainer, and engines get them
    merged.

    Worked example, a Qwen3 of 151,936 tokens with tied embeddings: `vocabulary` is 151936, `parameters` begins with
    `model.embed_tokens.weight` and has no `lm_head.weight`, which `tied` maps to it.
    """

    architecture: str
    """The model's class, such as `Qwen3ForCausalLM`."""
    model_type: str
    """Its family, such as `qwen3`."""
    vocabulary: int
    """Rows of the head: token ids are below it. A tokenizer may know fewer."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids of the generation config, or of the config if the folder has none."""
    longest_context: int | None
    """Positions it supports; None if its config does not say."""
    layers: LayerFacts
    parameters: tuple[ParameterFacts, ...]
    """Tied ones once."""
    tied: tuple[tuple[str, str], ...]
    """Names of weights that are others' too: the second of each pair is in `parameters`."""
    experts: ExpertFacts | None
    head: HeadFacts

    @property
    def count(self) -> int:
        """Numbers of all parameters."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def bytes(self) -> int:
        """Memory of all parameters."""
        return sum(parameter.bytes for parameter in self.parameters)


@dataclass(frozen=True)
class TokenFacts:
    """What every run has to know of its model, and what costs next to nothing to find out: see `ModelFacts`."""

    vocabulary: int
    eos_token_ids: tuple[int, ...]


def read_token_facts(config: ModelConfig) -> TokenFacts:
    """As `read_facts`, for all models there are, and without asking for shapes, which may take a process of its own."""
    folder = Path(local_folder(config))
    with _refused_as_setup(config):
        text = _settings(config, folder).get_text_config()
        stored_tensors(folder)  # weights that cannot be used are refused before anything is started
        return TokenFacts(int(text.vocab_size), _eos_token_ids(folder))


def read_facts(config: ModelConfig) -> ModelFacts:
    """The facts of the model that `load_model(config)` loads; raises `SetupError` if its folder holds no such model."""
    folder = Path(local_folder(config))
    with _refused_as_setup(config):
        settings = _settings(config, folder)
        text = settings.get_text_config()
        shapes, tied = loaded_shapes(config, settings, stored_tensors(folder))
        parameters = tuple(ParameterFacts(name, config.dtype, shape) for name, shape in shapes.items())
        return ModelFacts(
            architecture=str(next(iter(settings.architectures or ()), type(settings).__name__)),
            model_type=str(text.model_type),
            vocabulary=int(text.vocab_size),
            eos_token_ids=_eos_token_ids(folder),
            longest_context=longest_context(text.to_dict()),
            layers=_layers(text),
            parameters=parameters,
            tied=tuple(tied.items()),
            experts=_experts(text, shapes),
            head=HeadFacts(LogitTransform.of(text), has_bias=f"{HEAD}.bias" in shapes),
        )


def _settings(config: ModelConfig, folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code, local_files_only=True)


@contextmanager
def _refused_as_setup(config: ModelConfig) -> Iterator[None]:
    """Errors of whoever reads the folder become errors about `model.path`."""
    try:
        yield
    except SetupError:
        raise
    except AttributeError as error:
        raise SetupError(f"model.path: the config of {config.path!r} does not say enough: {error}") from error
    except LOADING_ERRORS as error:
        raise SetupError(not_loadable(config, "a causal language model", error)) from error


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    """As a loaded model's `generation_config` has them."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # the folder has none
        generation = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True, local_files_only=True
        )
    found = generation.eos_token_id
    several = found if isinstance(found, list | tuple) else [found]
    return tuple(int(token) for token in several if token is not None)


def _layers(text: Any) -> LayerFacts:
    heads = int(text.num_attention_heads)
    return LayerFacts(
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        heads=heads,
        key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dimension=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
    )


def _experts(text: Any, shapes: Mapping[str, tuple[int, ...]]) -> ExpertFacts | None:
    matched = (_EXPERT.search(name) for name in shapes)
    layers = sorted({int(found.group(1)) for found in matched if found is not None})
    if not layers:
        return None
    return ExpertFacts(tuple(layers), _first(text, _EXPERT_COUNTS), _first(text, _EXPERTS_PER_TOKEN))


def _first(text: Any, names: tuple[str, ...]) -> int:
    found = [getattr(text, name) for name in names if getattr(text, name, None) is not None]
    if not found:
        raise SetupError(f"model.path: {text.model_type} has experts, but its config has none of {', '.join(names)}")
    return int(found[0])

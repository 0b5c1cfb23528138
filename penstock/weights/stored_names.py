"""From tensors as files have them to parameters as the loaded model has them.

transformers renames and joins tensors of some families while it loads them: a file has a matrix for each expert, the
model one tensor for all. The common case is computed here; any other is asked of a model without memory, which a helper
process builds (`meta_model`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.weights.headers import StoredTensor, same_bytes
from penstock.weights.meta_model import ask_meta_model

if TYPE_CHECKING:
    from penstock.config.sections.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]
_PLAIN_NAME = re.compile(r"(model\.|lm_head\.)")
_FAMILIAR = {
    ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight", "mlp.experts.gate_up_proj"),
    ("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj"),
}
"""How transformers joins the experts of most families: sources, then the target."""
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_NO_PARAMETER = re.compile(r".*\.rotary_emb\.inv_freq")
"""A buffer that old files still have."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def loaded_shapes(
    config: ModelConfig, settings: Any, stored: Mapping[str, StoredTensor]
) -> tuple[Shapes, dict[str, str]]:
    """Shapes of the parameters by name, tied ones once; and the names that are tied to one of them."""
    joins = _joins_experts(settings)
    if joins is None or not all(_PLAIN_NAME.match(name) for name in stored) or _EMBEDDING not in stored:
        return ask_meta_model(config)
    shapes = {name: tensor.shape for name, tensor in stored.items() if not _NO_PARAMETER.fullmatch(name)}
    if joins:
        shapes = _joined(shapes)
    if not settings.get_text_config().tie_word_embeddings:
        return shapes, {}
    if _HEAD in stored and not same_bytes(stored[_HEAD], stored[_EMBEDDING]):
        return shapes, {}  # transformers believes the file, not the config
    shapes.pop(_HEAD, None)
    return shapes, {_HEAD: _EMBEDDING}


def _joins_experts(settings: Any) -> bool | None:
    """Whether experts are joined, the familiar way, when this model is loaded; None if it is not that simple."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if settings.get_text_config() is not settings or getattr(settings, "auto_map", None):
        return None
    names = [*(settings.architectures or ()), settings.model_type]
    changes = next((found for found in map(get_checkpoint_conversion_mapping, names) if found is not None), None)
    if changes is None:
        return False
    if {(*change.source_patterns, *change.target_patterns) for change in changes} == _FAMILIAR:
        return True
    return None


def _joined(shapes: Shapes) -> Shapes:
    """The matrices of a layer's experts as two tensors.

    >>> _joined({f"a.mlp.experts.{e}.{p}_proj.weight": (5, 3) for e in range(2) for p in ("gate", "up")})
    {'a.mlp.experts.gate_up_proj': (2, 10, 3)}
    """
    counts: dict[str, int] = {}
    joined: Shapes = {}
    for name, shape in shapes.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            joined[name] = shape
            continue
        target = f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"
        counts[target] = counts.get(target, 0) + (found[3] != "up")
        rows, columns = shape
        joined[target] = (counts[target], rows if found[3] == "down" else 2 * rows, columns)
    return joined

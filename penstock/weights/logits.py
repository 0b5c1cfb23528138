"""What a model does to its head's output to turn it into logits; trainer and engine share this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.runtime.wire.crossing import crosses


@crosses
@dataclass(frozen=True)
class LogitTransform:
    """A factor, then a soft cap: `logits = cap * tanh(scale * raw / cap)`; without a cap `scale * raw`.

    Computed in the softmax's dtype, regardless of the weights' dtype.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """As a Hugging Face model's config says: Gemma caps, Cohere multiplies, Granite divides."""
        scale = float(_setting(config, "logit_scale", 1.0)) / float(_setting(config, "logits_scaling", 1.0))
        cap = _setting(config, "final_logit_softcapping", None)
        return cls(scale, None if cap is None else float(cap))

    def apply_(self, raw: Tensor) -> Tensor:
        """Turn the head's output into logits, in place."""
        if self.softcap is not None:
            return raw.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        return raw if self.scale == 1.0 else raw.mul_(self.scale)

    def slope(self, logits: Tensor) -> Tensor:
        """`d logits / d raw` of a soft cap, from the logits; in new memory."""
        assert self.softcap is not None
        return (logits / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


IDENTITY = LogitTransform()


def _setting(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value

"""The base class of all configuration sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings. Unknown keys are errors; attribute docstrings become field descriptions.

    Strict: a value of another type is an error rather than converted, so that `seed: true` is not seed 1. Whole numbers
    are fine where a number is asked for; NaN and infinity are not.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

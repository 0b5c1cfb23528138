"""Settings of the mathematics: advantages, loss, off-policy correction."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from penstock.config.base import Section


class GrpoAdvantage(Section):
    """Reward minus the group's mean, optionally over the group's standard deviation."""

    kind: Literal["grpo"] = "grpo"
    """Name of the estimator."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class PpoClipLoss(Section):
    """The clipped policy-gradient objective with separate lower and upper clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """Name of the loss."""
    level: Literal["token", "sequence"] = "token"
    """`token`: every token weighs the same. `sequence`: every response weighs the same."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_high."""


class NoCorrection(Section):
    """Engine and trainer are taken to agree."""

    kind: Literal["none"] = "none"
    """Name of the correction."""


class TruncatedImportanceSampling(Section):
    """Each token's loss is weighted by min(cap, p_trainer / p_engine)."""

    kind: Literal["tis"] = "tis"
    """Name of the correction."""
    cap: PositiveFloat = 2.0
    """The largest weight."""


CorrectionConfig = Annotated[NoCorrection | TruncatedImportanceSampling, Field(discriminator="kind")]


class AlgorithmConfig(Section):
    """The mathematics of a step."""

    advantage: GrpoAdvantage = GrpoAdvantage()
    """How rewards become advantages."""
    loss: PpoClipLoss = PpoClipLoss()
    """The policy loss."""
    correction: CorrectionConfig = NoCorrection()
    """What makes up for the difference between the engine's and the trainer's log-probs."""
    old_policy: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs are the denominator of the ratio. `trainer`: the weights at the start of the step."""

"""Settings of the algorithm: rewards, advantages, loss, KL penalty, off-policy correction, dynamic sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from penstock.config.reading.values import is_import_path
from penstock.config.sections.base import Section

ClipRatioLow = Annotated[float, Field(gt=0, le=1)]
Aggregation = Literal["token_mean", "sequence_mean", "token_sum_norm"]
ImportPath = Annotated[str, AfterValidator(is_import_path)]


class RewardConfig(Section):
    """How an environment's rewards are scaled, clipped and shaped by length before they become advantages."""

    scale: Annotated[float, Field(gt=0)] = 1.0
    """Rewards are multiplied by this."""
    clip_low: float | None = None
    """Scaled rewards below this are raised to it."""
    clip_high: float | None = None
    """Scaled rewards above this are lowered to it."""
    overlong: Literal["none", "soft", "mask"] = "none"
    """How to treat very long responses. `soft`: a penalty that grows with the length. `mask`: truncated responses are
    not trained on."""
    overlong_limit: PositiveInt | None = None
    """With `soft`: number of tokens, over all turns, at which the full penalty applies; by default
    `rollout.sampling.max_new_tokens`."""
    overlong_buffer: PositiveInt | None = None
    """With `soft`: how many tokens before the limit the penalty starts."""
    overlong_penalty: PositiveFloat = 1.0
    """With `soft`: the full penalty, for a response that reaches the limit."""


class GrpoAdvantage(Section):
    """Reward minus the group's mean, optionally divided by the group's standard deviation."""

    kind: Literal["grpo"] = "grpo"
    """Name of the estimator."""
    normalize_std: bool = True
    """Divide by the group's standard deviation; false gives the Dr. GRPO estimator."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class RlooAdvantage(Section):
    """Reward minus the mean of the group's other samples."""

    kind: Literal["rloo"] = "rloo"
    """Name of the estimator."""


class LeaveOneOutAdvantage(Section):
    """Reward minus the mean of the group's other samples, divided by their standard deviation."""

    kind: Literal["leave_one_out"] = "leave_one_out"
    """Name of the estimator."""
    epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation."""


class MaxNormalizedAdvantage(Section):
    """Reward minus the group's mean, divided by the group's largest deviation from it: between -1 and 1."""

    kind: Literal["max_normalized"] = "max_normalized"
    """Name of the estimator."""
    epsilon: PositiveFloat = 1e-4
    """Added to the largest deviation."""


class RewardAdvantage(Section):
    """The reward itself, without a baseline."""

    kind: Literal["reward"] = "reward"
    """Name of the estimator."""


class BatchWhitenedAdvantage(Section):
    """Reward minus the step's mean, divided by the step's standard deviation; needs the whole batch at once."""

    kind: Literal["batch_whitened"] = "batch_whitened"
    """Name of the estimator."""
    epsilon: PositiveFloat = 1e-8
    """Added to the standard deviation."""


class ReinforcePpAdvantage(Section):
    """REINFORCE++: rewards minus the KL-to-go, whitened over all tokens of the step; needs the whole batch at once."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    """Name of the estimator."""
    epsilon: PositiveFloat = 1e-8
    """Added to the standard deviation."""


class ReinforcePpBaselineAdvantage(Section):
    """REINFORCE++ with the group's mean as baseline, whitened over all tokens; needs the whole batch at once."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """Name of the estimator."""
    epsilon: PositiveFloat = 1e-8
    """Added to the standard deviation."""


class CustomAdvantage(Section):
    """An estimator of your own: a function, or a class with callable instances."""

    kind: Literal["custom"] = "custom"
    """Name of the estimator."""
    import_path: ImportPath
    """`module:thing`, called as `thing(scores, **args)`, or, for a class, as `thing(**args)(scores)`; `scores` has
    `rewards_S`, `lengths_S` and `groups_S`, and the return value is one advantage per sample."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function or class."""
    whole_batch: bool = False
    """True if it compares samples of different groups: it is then called once with the whole step, which cannot be
    streamed. If false, it is called with one group at a time."""


AdvantageConfig = Annotated[
    GrpoAdvantage
    | RlooAdvantage
    | LeaveOneOutAdvantage
    | MaxNormalizedAdvantage
    | RewardAdvantage
    | BatchWhitenedAdvantage
    | ReinforcePpAdvantage
    | ReinforcePpBaselineAdvantage
    | CustomAdvantage,
    Field(discriminator="kind"),
]


class PpoClipLoss(Section):
    """The clipped policy-gradient objective with separate lower and upper clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """Name of the loss."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: every token weighs the same. `sequence_mean`: every response does. `token_sum_norm`: Dr. GRPO."""
    constant_length: PositiveInt | None = None
    """With `token_sum_norm`: token sums are divided by this times the number of responses; usually the longest one."""
    clip_ratio_low: ClipRatioLow = 0.2
    """The ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 0.2
    """The ratio is clipped at 1 + clip_ratio_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages the loss is bounded by this times the advantage; by default there is no such bound."""


class GspoLoss(Section):
    """GSPO: clips the ratio of whole sequences, a geometric mean over their tokens; every sequence has the same
    weight."""

    kind: Literal["gspo"] = "gspo"
    """Name of the loss."""
    clip_ratio_low: ClipRatioLow = 3e-4
    """The sequence's ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: PositiveFloat = 4e-4
    """The sequence's ratio is clipped at 1 + clip_ratio_high."""


class CispoLoss(Section):
    """CISPO: the clipped ratio is a constant weight on each token's log-prob, so every token keeps its gradient."""

    kind: Literal["cispo"] = "cispo"
    """Name of the loss."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: every token weighs the same. `sequence_mean`: every response does. `token_sum_norm`: Dr. GRPO."""
    constant_length: PositiveInt | None = None
    """With `token_sum_norm`: token sums are divided by this times the number of responses; usually the longest one."""
    clip_ratio_low: ClipRatioLow | None = None
    """The weight is at least 1 - clip_ratio_low; by default there is no lower bound."""
    clip_ratio_high: PositiveFloat = 5.0
    """The weight is at most 1 + clip_ratio_high."""


class ReinforceLoss(Section):
    """Plain REINFORCE: advantage times log-prob, without a ratio."""

    kind: Literal["reinforce"] = "reinforce"
    """Name of the loss."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: every token weighs the same. `sequence_mean`: every response does. `token_sum_norm`: Dr. GRPO."""
    constant_length: PositiveInt | None = None
    """With `token_sum_norm`: token sums are divided by this times the number of responses; usually the longest one."""


class CustomLoss(Section):
    """A policy loss of your own: a function, or a class with callable instances."""

    kind: Literal["custom"] = "custom"
    """Name of the loss."""
    import_path: ImportPath
    """`module:thing`, called as `thing(tokens, **args)`, or, for a class, as `thing(**args)(tokens)`; `tokens` has
    `logprobs_T`, `old_logprobs_T`, `advantages_T` and more, and the return value is the loss of each token."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function or class."""
    columns: list[str] = Field(default_factory=list)
    """Columns of the environment's own (`extra_columns`) that it needs: `tokens.columns_T` has those with a value per
    token, `tokens.columns_R` those with a value per response."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: every token weighs the same. `sequence_mean`: every response does. `token_sum_norm`: Dr. GRPO."""
    constant_length: PositiveInt | None = None
    """With `token_sum_norm`: token sums are divided by this times the number of responses; usually the longest one."""


LossConfig = Annotated[PpoClipLoss | GspoLoss | CispoLoss | ReinforceLoss | CustomLoss, Field(discriminator="kind")]


class KlConfig(Section):
    """A penalty for moving away from the reference policy: the initial model or, with LoRA, the base model."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 turns it off, and no reference policy is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the KL divergence from sampled tokens."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss. `reward`: subtracted from each token's advantage, summed over the tokens that
    follow."""


class NoCorrection(Section):
    """No correction: engine and trainer are assumed to agree."""

    kind: Literal["none"] = "none"
    """Name of the correction."""


class TruncatedImportanceSampling(Section):
    """Each token's loss is weighted by min(cap, p_trainer / p_engine)."""

    kind: Literal["tis"] = "tis"
    """Name of the correction."""
    cap: PositiveFloat = 2.0
    """Maximum weight."""


class IcePop(Section):
    """Each token's loss is weighted by p_trainer / p_engine; tokens outside the bounds are masked."""

    kind: Literal["icepop"] = "icepop"
    """Name of the correction."""
    low: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Tokens whose ratio is below this are masked."""
    high: Annotated[float, Field(ge=1)] = 5.0
    """Tokens whose ratio is above this are masked."""


class SequenceMasked(Section):
    """Each response is weighted by its sequence's p_trainer / p_engine; responses outside the bounds are masked."""

    kind: Literal["sequence_masked"] = "sequence_masked"
    """Name of the correction."""
    low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Responses whose ratio is below this are masked; by default there is no lower bound."""
    high: Annotated[float, Field(ge=1)] = 2.0
    """Responses whose ratio is above this are masked."""
    mean: Literal["sum", "geometric"] = "sum"
    """`sum`: the product of the tokens' ratios, exact. `geometric`: their geometric mean, milder for long responses."""


class Decoupled(Section):
    """Decoupled PPO: the ratio is clipped around the proximal policy (the trainer's), weighted by proximal / engine."""

    kind: Literal["decoupled"] = "decoupled"
    """Name of the correction."""
    cap: PositiveFloat | None = None
    """Tokens whose weight is above this are masked; by default none are."""


CorrectionConfig = Annotated[
    NoCorrection | TruncatedImportanceSampling | IcePop | SequenceMasked | Decoupled, Field(discriminator="kind")
]


class DynamicSamplingConfig(Section):
    """Groups whose samples all have the same reward give no learning signal: replace them with groups of other
    prompts."""

    enabled: bool = False
    """Replace such groups instead of training on them."""
    max_filtered_per_step: PositiveInt = 64
    """Maximum number of groups replaced per step."""
    on_limit: Literal["train", "stop"] = "train"
    """When that limit is reached: `train` on such groups after all, or `stop` the run."""


_DEFAULTS = {"advantage": "grpo", "loss": "ppo_clip"}


class AlgorithmConfig(Section):
    """Rewards, advantages, loss and corrections."""

    reward: RewardConfig = RewardConfig()
    """What is done to an environment's rewards before they become advantages."""
    advantage: AdvantageConfig = Field(default_factory=GrpoAdvantage)
    """How rewards become advantages."""
    loss: LossConfig = Field(default_factory=PpoClipLoss)
    """The policy loss."""
    kl: KlConfig = KlConfig()
    """A penalty for leaving the reference policy."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; 0 turns it off."""
    correction: CorrectionConfig = Field(default_factory=NoCorrection)
    """What makes up for the difference between the engine's and the trainer's log-probs."""
    old_policy: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs are the denominator of the ratio. `trainer`: the trainer's, with the weights at the start of the
    step. `engine`: those the engine sampled with."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """What happens to groups without spread in their rewards."""

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, data: Any) -> Any:
        """Settings of an advantage or loss that is not named are those of the default one."""
        if not isinstance(data, dict):
            return data
        given = {name: data[name] for name in _DEFAULTS if isinstance(data.get(name), dict)}
        return data | {name: {"kind": _DEFAULTS[name], **settings} for name, settings in given.items()}

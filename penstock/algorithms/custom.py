"""What custom losses and advantages receive, what they return, and how that is checked.

A custom loss and a custom advantage are callables of one argument each, `LossTokens` and `SampleScores`; their settings
are bound beforehand. Errors name the import path, because the user's code is the place to look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.losses import LossSum, weighted_sum
from penstock.algorithms.reduction import Metric, Normaliser
from penstock.errors import PenstockError, UserTrace
from penstock.text import cut, named_error, safe
from penstock.user_frames import frames_of, innermost, shown

_LONGEST_TRACEBACK = 8_000


class CustomCodeError(PenstockError):
    """A custom loss or advantage raised, or returned something that cannot be used."""

    trace: UserTrace | None = None
    """Where it raised; None if it did not."""


@dataclass(frozen=True)
class LossTokens:
    """What a custom loss receives: the trained tokens of one microbatch, `T` of them.

    Row lengths and arrival order decide which rows share a microbatch, so the loss of a token may depend only on its
    own row: `penstock verify` checks this.
    """

    logprobs_T: Tensor
    """Log-probs under the weights that are being trained; the only ones that carry a gradient."""
    old_logprobs_T: Tensor
    """Those of `algorithm.old_policy`. With `trainer` and one update per step: `logprobs_T` without gradient."""
    advantages_T: Tensor
    """Each token's advantage: its sample's, less the KL to go if the penalty is in the reward."""
    engine_logprobs_T: Tensor
    """Log-probs under the distribution that the engine drew the tokens from."""
    mask_T: Tensor
    """How much each token counts: always 1, because tokens that do not count are not included."""
    rows_T: Tensor
    """Which response each token belongs to; the tokens of a response are contiguous, in order and complete.
    `penstock.algorithms.rows` has sums over them."""
    columns_T: Mapping[str, Tensor] = field(default_factory=dict)
    """Those of `algorithm.loss.columns` that have a value per token, in their own dtypes: `[T, ...]`."""
    columns_R: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that have a value per response, `[R, ...]`: `columns_R[name][rows_T]` has the value of each token's."""


PolicyLoss = Callable[[LossTokens], Tensor | tuple[Tensor, Mapping[str, Tensor]]]
"""Maps tokens to the loss of each, or to that plus named metrics to record, one number per token: `train/loss/<name>`
is their mean."""


@dataclass(frozen=True)
class SampleScores:
    """What a custom advantage receives: the samples of one group, or of a whole step; `S` of them, in float64."""

    rewards_S: Tensor
    """As shaped by `algorithm.reward`."""
    lengths_S: Tensor
    """Trained tokens: 0 for samples that are not trained."""
    groups_S: Tensor
    """Which prompt each sample belongs to, as whole numbers from 0."""


AdvantageEstimator = Callable[[SampleScores], Any]
"""Maps scores to an advantage for each sample: a tensor, an array or a list of numbers."""


def custom_loss(loss: PolicyLoss, tokens: LossTokens, weights_T: Tensor, path: str) -> LossSum:
    """The weighted sum of a custom loss's values, and its metrics; `path` is its import path, for messages."""
    given = _called(loss, tokens, f"the loss {path}")
    values_T, numbers = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    _check_values(values_T, tokens.logprobs_T, f"the loss {path}")
    inside_T = tokens.mask_T > 0
    metrics = {}
    for name, number_T in numbers.items():
        _check_shape(number_T, tokens.logprobs_T, f"the loss {path}: its number {name!r}")
        metrics[f"loss/{name}"] = Metric(weighted_sum(number_T.detach(), tokens.mask_T, inside_T), Normaliser.TOKENS)
    return LossSum(weighted_sum(values_T.double().masked_fill(~inside_T, 0.0), weights_T, inside_T), metrics)


def custom_advantages(estimator: AdvantageEstimator, scores: SampleScores, path: str) -> Tensor:
    """A custom estimator's advantages in float64, one finite number for each sample."""
    given, count = _called(estimator, scores, f"the advantage {path}"), len(scores.rewards_S)
    try:
        advantages_S = torch.as_tensor(given).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CustomCodeError(f"the advantage {path} gave {_shown(given)}; it must return a list of numbers") from error
    if advantages_S.shape != (count,):
        shape = "x".join(map(str, advantages_S.shape)) or "a single number"
        raise CustomCodeError(
            f"the advantage {path} gave {shape} for {count} samples; it must return one number for each"
        )
    if not advantages_S.isfinite().all():
        sample = int((~advantages_S.isfinite()).nonzero()[0, 0])
        reward = float(scores.rewards_S[sample])
        raise CustomCodeError(
            f"the advantage {path} gave {float(advantages_S[sample])} for a sample with the reward {reward:g}; "
            "advantages must be finite"
        )
    return advantages_S


def _called(code: Callable[[Any], Any], argument: Any, name: str) -> Any:
    try:
        return code(argument)
    except Exception as error:
        raise _raised(name, error) from error


def _raised(name: str, error: Exception) -> CustomCodeError:
    """What user code raised, with the line of user code it came from."""
    user_frames, said = frames_of(error.__traceback__), named_error(error)
    frame = innermost(user_frames)
    where = "" if frame is None else f" ({frame[0].rpartition('/')[2]}, line {frame[1]}, in {frame[2]})"
    at = "" if frame is None else f" at {frame[0]}:{frame[1]} in {frame[2]}"
    failure = CustomCodeError(f"{name} raised {said}{safe(where)}")
    head = "Traceback (most recent call last):\n" if user_frames else ""
    traceback = safe(f"{head}{''.join(shown(user_frames))}{said}\n")
    failure.trace = UserTrace(safe(f"{type(error).__name__}{at}"), cut(traceback, _LONGEST_TRACEBACK))
    return failure


def _check_values(values_T: object, logprobs_T: Tensor, name: str) -> None:
    _check_shape(values_T, logprobs_T, name)
    assert isinstance(values_T, Tensor)
    if logprobs_T.requires_grad and not values_T.requires_grad:
        raise CustomCodeError(f"{name} gave values without a gradient; compute them from logprobs_T, not detached")


def _check_shape(values_T: object, logprobs_T: Tensor, name: str) -> None:
    if not isinstance(values_T, Tensor):
        raise CustomCodeError(f"{name} gave {_shown(values_T)}; it must return a tensor with one number per token")
    if values_T.shape != logprobs_T.shape:
        raise CustomCodeError(
            f"{name} gave a tensor of shape {tuple(values_T.shape)} for {len(logprobs_T)} tokens; it must return one "
            "for each, which Penstock weights and sums as algorithm.loss.aggregation says"
        )


def _shown(value: object) -> str:
    return f"a {type(value).__name__}"

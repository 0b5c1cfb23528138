"""What happens to a reward between the environment and the advantage."""

from __future__ import annotations

import torch
from torch import Tensor


def shape_rewards(
    rewards_S: Tensor,
    lengths_S: Tensor,
    *,
    scale: float = 1.0,
    clip_low: float | None = None,
    clip_high: float | None = None,
    overlong_limit: float | None = None,
    overlong_buffer: float = 0,
    overlong_penalty: float = 1.0,
) -> Tensor:
    """Scale, then clip, then add the penalty for long responses; computed in float64.

    The penalty is DAPO's soft one (Yu et al., 2025): zero up to `overlong_limit - overlong_buffer` tokens, then linear
    down to `-overlong_penalty` at the limit, and constant beyond it. It comes last, in the units of the clipped reward,
    so neither scale nor clip can remove it. Without a buffer it is a step: zero up to and including the limit, the
    whole penalty beyond. `overlong_limit` None means no penalty.
    """
    shaped_S = rewards_S.to(torch.float64) * scale
    if clip_low is not None or clip_high is not None:
        shaped_S = shaped_S.clamp(clip_low, clip_high)
    if overlong_limit is not None:
        over_S = lengths_S.to(torch.float64) - (overlong_limit - overlong_buffer)
        share_S = (over_S / overlong_buffer).clamp(0, 1) if overlong_buffer > 0 else (over_S > 0).to(torch.float64)
        shaped_S = shaped_S - overlong_penalty * share_S
    return shaped_S.to(rewards_S.dtype)


def has_spread(rewards_G: Tensor) -> Tensor:
    """Whether the rewards of a group differ at all; the last axis is the group, leading axes are separate groups.

    Without spread, all group-relative advantages are zero: dynamic sampling replaces such groups.
    """
    return rewards_G.amax(-1) != rewards_G.amin(-1)

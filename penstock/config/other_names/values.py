"""Values that other systems and papers know, for settings of ours that have other words for them, or none."""

from __future__ import annotations

_AGGREGATION = "`algorithm.loss.aggregation: {}` here"
_ADVANTAGE = "is an advantage here: `algorithm.advantage.kind: {}`"
_TOKEN_LOSS = "has no equivalent among our losses"
_NO_CRITIC = "has no equivalent: there is no critic"
_DR_GRPO = (
    "is `algorithm.advantage.kind: grpo` with `algorithm.advantage.normalize_std: false` and "
    "`algorithm.loss.aggregation: token_sum_norm` here"
)
_GRPO_LOSS = "is `algorithm.loss.kind: ppo_clip` here, with `algorithm.advantage.kind: grpo`"
_DAPO_LOSS = (
    "is `algorithm.loss.kind: ppo_clip` here, with `algorithm.loss.aggregation: token_mean`, a higher "
    "`algorithm.loss.clip_ratio_high` and `algorithm.dynamic_sampling.enabled: true`"
)
_PLUS_PLUS = "is `algorithm.advantage.kind: reinforce_pp` here"
_PLUS_PLUS_BASELINE = "is `algorithm.advantage.kind: reinforce_pp_baseline` here"
_TIS = "is `algorithm.correction.kind: tis` here"
_SEQUENCE_MASKED = "is `algorithm.correction.kind: sequence_masked` here"
_NO_TRUNCATED_SEQUENCES = (
    "has no equivalent; `sequence_masked` drops responses instead of capping their weight, and `tis` caps the "
    "weight of tokens"
)
_WINDOWED = "is `staleness.policy: windowed` here, with `staleness.max_staleness`"
_ON_POLICY = "is `staleness.policy: on_policy` here"
_IN_ORDER = "is `staleness.policy: in_order` here, with `staleness.lookahead: 1`"

FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "algorithm.loss.kind": {
        **dict.fromkeys(("ppo", "vanilla", "clip", "clipped", "pg_clip"), "is `algorithm.loss.kind: ppo_clip` here"),
        "grpo": _GRPO_LOSS,
        "dapo": _DAPO_LOSS,
        "dr_grpo": _DR_GRPO,
        "bnpo": "has no equivalent: nothing depends on the microbatch; closest is `algorithm.loss.kind: ppo_clip` with "
        "`algorithm.loss.aggregation: token_mean`",
        "rloo": _ADVANTAGE.format("rloo"),
        **dict.fromkeys(("reinforce_pp", "reinforce_plus_plus"), _ADVANTAGE.format("reinforce_pp")),
        **dict.fromkeys(("gpg", "pg", "policy_gradient"), "is `algorithm.loss.kind: reinforce` here"),
        "decoupled": "is `algorithm.loss.kind: ppo_clip` with `algorithm.correction.kind: decoupled` here",
        **dict.fromkeys(("sapo", "luspo", "vespo", "gmpo", "geo_mean", "clip_cov", "kl_cov", "cpgd"), _TOKEN_LOSS),
    },
    "algorithm.loss.aggregation": {
        "seq_mean_token_mean": f"is {_AGGREGATION.format('sequence_mean')}",
        "seq_mean_token_sum": f"is {_AGGREGATION.format('token_sum_norm')}, with `algorithm.loss.constant_length: 1`",
        "seq_mean_token_sum_norm": f"is {_AGGREGATION.format('token_sum_norm')}, with `algorithm.loss.constant_length`",
        "token_mean": f"is {_AGGREGATION.format('token_mean')}",
        "sequence_mean": f"is {_AGGREGATION.format('sequence_mean')}",
        "token_sum_norm": f"is {_AGGREGATION.format('token_sum_norm')}",
        "seq_mean": f"is {_AGGREGATION.format('sequence_mean')}",
        "grpo": f"is {_AGGREGATION.format('sequence_mean')}",
        "dapo": f"is {_AGGREGATION.format('token_mean')}",
        "dr_grpo": f"is {_AGGREGATION.format('token_sum_norm')}, with `algorithm.loss.constant_length`",
        "token_sum": "has no equivalent; closest is `algorithm.loss.aggregation: token_sum_norm`",
    },
    "algorithm.advantage.kind": {
        "dr_grpo": _DR_GRPO,
        "dapo": "is `algorithm.advantage.kind: grpo` here, with `algorithm.loss.aggregation: token_mean` and "
        "`algorithm.dynamic_sampling.enabled: true`",
        **dict.fromkeys(("gae", "ppo", "vtrace"), _NO_CRITIC),
        **dict.fromkeys(("gspo", "cispo"), "is a loss here: see `algorithm.loss.kind`; its advantage is `grpo`"),
        **dict.fromkeys(("reinforce_plus_plus", "reinforce++"), _PLUS_PLUS),
        **dict.fromkeys(("reinforce_plus_plus_baseline", "reinforce++_baseline"), _PLUS_PLUS_BASELINE),
        "reinforce": "is `algorithm.advantage.kind: reward` with `algorithm.loss.kind: reinforce` here",
        "loo": "is `algorithm.advantage.kind: rloo` here, or `leave_one_out`, which divides by the standard deviation",
        "remax": "has no equivalent: there is no greedy baseline",
        **dict.fromkeys(("opo", "gdpo", "grpo_passk", "maxrl"), "has no equivalent"),
    },
    "algorithm.correction.kind": {
        **dict.fromkeys(("token", "token_truncate", "truncated", "truncate", "truncated_is"), _TIS),
        **dict.fromkeys(("token_mask", "mis"), "is `algorithm.correction.kind: icepop` here"),
        **dict.fromkeys(("sequence_mask", "seq_mask", "seq_mis"), _SEQUENCE_MASKED),
        **dict.fromkeys(("sequence", "sequence_truncate", "seq_tis"), _NO_TRUNCATED_SEQUENCES),
        "decoupled_ppo": "is `algorithm.correction.kind: decoupled` here",
        **dict.fromkeys(("off", "false"), "is `algorithm.correction.kind: none` here"),
    },
    "staleness.policy": {
        **dict.fromkeys(("sync", "synchronous", "colocate"), _ON_POLICY),
        **dict.fromkeys(("async", "asynchronous", "off_policy", "separate_async", "colocate_async"), _WINDOWED),
        **dict.fromkeys(("one_step_off", "one_step_off_policy"), _IN_ORDER),
        "fifo": "is `staleness.policy: weight_fifo` here, or `in_order` with groups trained as they were dispatched",
        "drop": f"{_WINDOWED}; groups beyond the window are always dropped",
        "wait": "is closest to `staleness.policy: weight_fifo` here",
    },
}
"""What to say of a value, behind it in backticks, by the setting that it was given for."""

ALGORITHMS = frozenset({"algorithm.loss.kind", "algorithm.advantage.kind", "algorithm.correction.kind"})
"""Settings whose values name algorithms: ones that look alike compute different things, so that no guess is safe."""


def foreign_value(key: str, value: object) -> str | None:
    """What to say of the value of a setting where another system has it; None where none of them is known to.

    Words are the same however they are joined: `seq-mean-token-sum` and `seq_mean_token_sum`.

    Worked example: foreign_value("algorithm.advantage.kind", "gae") is "`gae` has no equivalent: there is no critic".
    """
    if not isinstance(value, str | bool):
        return None
    word = str(value).strip().lower().replace("-", "_").replace(" ", "_")
    said = FOREIGN_VALUES.get(key, {}).get(word)
    return f"`{value}` {said}" if said else None

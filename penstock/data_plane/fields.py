"""The columns that Penstock itself writes and reads, in one place: their names, and what they hold."""

from __future__ import annotations

from typing import Final

from penstock.data_plane.field_spec import FLOATING, FieldSpec, fixed, objects, per_token
from penstock.errors import DataPlaneError

INPUT_IDS: Final = "input_ids"
"""Per token, int64: prompt and response."""
TOKEN_MASK: Final = "token_mask"
"""Per token, float32: 1 where the model itself produced the token and it is trained."""
GENERATION_LOGPROBS: Final = "generation_logprobs"
"""Per token, float32 (or wider): log-prob of the token under the distribution that the engine drew it from, truncated
or not; 0 where the model did not produce it."""
KEPT_COUNTS: Final = "kept_counts"
"""Per token, int32: how many tokens a truncated distribution had left; 0 where the whole vocabulary was drawn from, and
where the model did not produce the token."""
KEPT_IDS: Final = "kept_ids"
"""Per row, int32: the token ids that were left, as many for each token as `kept_counts` says, one after the other."""
TOKEN_VERSIONS: Final = "token_versions"
"""Per token, int32: weight version that produced the token; -1 where the model did not produce it."""
REWARD: Final = "reward"
"""Per sample, float32."""
ADVANTAGE: Final = "advantage"
"""Per sample, float32; written by the advantage pump."""
SAMPLE_MASK: Final = "sample_mask"
"""Per sample, float32: 0 takes the whole sample out of the loss."""
RESPONSE_LENGTH: Final = "response_length"
"""Per sample, int64: number of trained tokens."""
TRUNCATED: Final = "truncated"
"""Per sample, bool: the response hit the token limit."""
RESPONSE_TEXT: Final = "response_text"
"""Per sample, object: the decoded response."""
REFERENCE_LOGPROBS: Final = "reference_logprobs"
"""Per token, in the dtype that log-probs are computed in: log-prob under the reference policy; written by the trainer
if the algorithm has a KL penalty."""
OLD_LOGPROBS: Final = "old_logprobs"
"""Per token, in the dtype that log-probs are computed in: log-prob under the weights at the start of the step; written
if a step has several updates."""
KL_TO_GO_SUM: Final = "kl_to_go_sum"
"""Per sample, float64: sum over its trained tokens of the KL to go; written by the trainer for REINFORCE++."""
KL_TO_GO_SQUARE_SUM: Final = "kl_to_go_square_sum"
"""Per sample, float64: sum of the squares of the same."""
KL_WEIGHT: Final = "kl_weight"
"""Per sample, float64: how much of a token's KL to go is taken from its advantage; written with the advantage."""

VALID_TOKENS: Final = "valid_tokens"
"""Not a column but a tag of a row in `KVBatchMeta`, int: how many of its tokens are trained; 0 if it is masked out."""

ROLLOUT_FIELDS: Final = (
    INPUT_IDS,
    TOKEN_MASK,
    GENERATION_LOGPROBS,
    TOKEN_VERSIONS,
    KEPT_COUNTS,
    KEPT_IDS,
    REWARD,
    SAMPLE_MASK,
    RESPONSE_LENGTH,
    TRUNCATED,
    RESPONSE_TEXT,
)
LATER_FIELDS: Final = (ADVANTAGE, REFERENCE_LOGPROBS, OLD_LOGPROBS, KL_TO_GO_SUM, KL_TO_GO_SQUARE_SUM, KL_WEIGHT)
"""What is added to a row after its rollout."""
TRAIN_FIELDS: Final = (INPUT_IDS, TOKEN_MASK, GENERATION_LOGPROBS, TOKEN_VERSIONS, SAMPLE_MASK, ADVANTAGE)
KEPT_FIELDS: Final = (KEPT_COUNTS, KEPT_IDS)
"""What a row's log-probs depend on apart from its tokens; rows without them were drawn from the whole vocabulary."""

SPECS: Final = {
    spec.name: spec
    for spec in (
        per_token(INPUT_IDS, "int64"),
        per_token(TOKEN_MASK, "float32"),
        per_token(GENERATION_LOGPROBS, FLOATING),
        per_token(TOKEN_VERSIONS, "int32"),
        per_token(KEPT_COUNTS, "int32"),
        per_token(KEPT_IDS, "int32"),
        fixed(REWARD, "float32"),
        fixed(ADVANTAGE, "float32"),
        fixed(SAMPLE_MASK, "float32"),
        fixed(RESPONSE_LENGTH, "int64"),
        fixed(TRUNCATED, "bool"),
        objects(RESPONSE_TEXT),
        per_token(REFERENCE_LOGPROBS, FLOATING),
        per_token(OLD_LOGPROBS, FLOATING),
        fixed(KL_TO_GO_SUM, "float64"),
        fixed(KL_TO_GO_SQUARE_SUM, "float64"),
        fixed(KL_WEIGHT, "float64"),
    )
}
"""What each of them holds."""


def schema(*names: str) -> tuple[FieldSpec, ...]:
    """The specs of the named columns."""
    unknown = [name for name in names if name not in SPECS]
    if unknown:
        raise DataPlaneError(f"{unknown} are not columns of Penstock's own; declare them with a FieldSpec")
    return tuple(SPECS[name] for name in names)


ROW_SCHEMA: Final = schema(*ROLLOUT_FIELDS, *LATER_FIELDS)
"""A run's rows, from rollout to loss."""


def sample_id(group_id: str, index: int) -> str:
    """The data-plane id of a group's `index`-th sample."""
    return f"{group_id}_g{index}"


def group_of(sample: str) -> str:
    """The group a sample id belongs to."""
    return sample.rpartition("_g")[0]

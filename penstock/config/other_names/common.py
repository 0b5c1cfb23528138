"""Names that belong to no one system."""

from __future__ import annotations

from penstock.config.other_names.rows import Row, Table

COMMON = Table(
    "elsewhere",
    (
        Row("`model_name_or_path`, `name_or_path`, `model_path`, `model_id`", "`model.path`"),
        Row("`num_epochs`, `n_epochs`", "`data.epochs`"),
        Row("`max_tokens`, `max_length`", "`rollout.sampling.max_new_tokens`"),
        Row("`max_seq_len`, `max_seq_length`", "`rollout.engine.max_model_len`"),
        Row("`kl_coef`, `kl_beta`", "`algorithm.kl.coefficient`"),
        Row("`entropy_bonus`, `ent_coef`", "`algorithm.entropy_coefficient`"),
        Row(
            "`eps_clip`, `clip_range`, `cliprange`", "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`"
        ),
        Row("`grad_clip`, `max_norm`", "`training.optimizer.max_grad_norm`"),
        Row(
            "`reward_fn`, `reward_func`",
            "`rollout.environment.import_path`",
            "with `rollout.environment.kind: function`",
            for_each=True,
        ),
        Row("`gamma`, `gae_lambda`", "no equivalent: there is no critic"),
    ),
)

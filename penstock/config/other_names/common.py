"""Names that belong to no one system."""

from __future__ import annotations

from penstock.config.other_names.entries import Entry, Table

COMMON = Table(
    "elsewhere",
    (
        Entry("`model_name_or_path`, `name_or_path`, `model_path`, `model_id`", "`model.path`"),
        Entry("`num_epochs`, `n_epochs`", "`data.epochs`"),
        Entry("`max_tokens`, `max_length`", "`rollout.sampling.max_new_tokens`"),
        Entry("`max_seq_len`, `max_seq_length`", "`rollout.engine.max_model_len`"),
        Entry("`kl_coef`, `kl_beta`", "`algorithm.kl.coefficient`"),
        Entry("`entropy_bonus`, `ent_coef`", "`algorithm.entropy_coefficient`"),
        Entry(
            "`eps_clip`, `clip_range`, `cliprange`", "`algorithm.loss.clip_ratio_low`, `algorithm.loss.clip_ratio_high`"
        ),
        Entry("`grad_clip`, `max_norm`", "`training.optimizer.max_grad_norm`"),
        Entry(
            "`reward_fn`, `reward_func`",
            "`rollout.environment.import_path`",
            "with `rollout.environment.kind: function`",
            for_each=True,
        ),
        Entry("`gamma`, `gae_lambda`", "no equivalent: there is no critic"),
    ),
)

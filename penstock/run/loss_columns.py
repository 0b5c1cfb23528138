"""The columns that a custom loss asks for: whether the rows of this run have them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from penstock.config.sections.algorithm import AlgorithmConfig, CustomLoss
from penstock.errors import ConfigError
from penstock.rollout.environments.extra_columns import ExtraColumn


def refuse_unknown_columns(algorithm: AlgorithmConfig, declared: Sequence[ExtraColumn], whose: str) -> None:
    """Raise `ConfigError` for each of `algorithm.loss.columns` that `whose` rows do not have, or no loss can use."""
    problems = list(_problems(algorithm, {column.name: column for column in declared}, whose))
    if problems:
        raise ConfigError(problems)


def _problems(algorithm: AlgorithmConfig, declared: dict[str, ExtraColumn], whose: str) -> Iterator[str]:
    if not isinstance(algorithm.loss, CustomLoss):
        return
    for name in algorithm.loss.columns:
        if name not in declared:
            near = difflib.get_close_matches(name, declared, n=1)
            there = f"it declares {', '.join(declared)}" if declared else "it declares none (extra_columns)"
            hint = f"did you mean {near[0]}?" if near else there
            yield f"algorithm.loss.columns: {whose} has no column {name!r}; {hint}"
        elif declared[name].kind == "object":
            yield f"algorithm.loss.columns: {name!r} of {whose} holds objects; a loss takes tensors: remove it"

"""The user's own loss: the loss of a token must not depend on the rows that share its microbatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.custom import LossTokens, PolicyLoss, custom_loss
from penstock.config.sections.algorithm import CustomLoss
from penstock.data_plane import fields
from penstock.data_plane.columns import JaggedColumn
from penstock.run.verify.findings import Check, Finding, NotChecked, Status
from penstock.run.verify.subject import Subject
from penstock.training.objective import load_loss
from penstock.training.targets import extra_fields

_BAR = 1e-9
_SEED = 0
_NOISE = 0.1
"""How far log-probs of the old policy are shifted, so ratios are not all one."""

CUSTOM_LOSS = Check(
    "custom_loss",
    "custom loss",
    ("relative_difference", "tokens", "responses"),
    "Which responses share a microbatch depends on their lengths and on when they arrive, so every run would train "
    "something different, and streaming would differ from the whole batch. Compute the loss of a token from its "
    "own response (tokens.rows_T) only: no mean, deviation or maximum over all tokens in the call, and no "
    "randomness. Penstock divides by the number of tokens or responses itself, as algorithm.loss.aggregation says.",
)


async def check_custom_loss(subject: Subject) -> Finding:
    """All sampled responses in one call of the loss, against one call per response."""
    config, loss = subject.config.algorithm.loss, load_loss(subject.config.algorithm)
    assert isinstance(config, CustomLoss)
    assert loss is not None
    tokens, path = _tokens(subject), config.import_path
    together = _gradient(loss, tokens, path)
    rows: list[int] = list(dict.fromkeys(tokens.rows_T.tolist()))
    apart = torch.cat([_gradient(loss, _only(tokens, row), path) for row in rows])
    gap = float((together - apart).norm() / together.norm().clamp(min=torch.finfo(torch.float64).tiny))
    figures = {"relative_difference": gap, "tokens": len(tokens.logprobs_T), "responses": len(rows)}
    fails = not gap <= _BAR
    problem = f"The gradient of {path} changes with the responses that share its microbatch." if fails else ""
    shown = f"{gap:.1e} between {len(rows)} responses together and one by one"
    status = Status.FAIL if fails else Status.PASS
    return Finding(status, shown, figures, {"relative_difference": _BAR}, f"at most {_BAR:.0e}", problem)


def _tokens(subject: Subject) -> LossTokens:
    """The sampled tokens with their engine's log-probs, old ones nearby, and a random advantage for each response."""
    extra = extra_fields(subject.config.algorithm)
    wanted = (fields.TOKEN_MASK, fields.GENERATION_LOGPROBS, *extra)
    batch = subject.data_plane.get_samples(subject.sampled.meta, wanted)
    mask = batch.jagged(fields.TOKEN_MASK)
    inside_S = mask.values.cpu() > 0
    rows_T = torch.repeat_interleave(mask.lengths_R)[inside_S]
    if len(set(rows_T.tolist())) < 2:
        raise NotChecked("There are no two responses to compare")
    engine_T = batch.jagged(fields.GENERATION_LOGPROBS).values.cpu().double()[inside_S]
    rng = torch.Generator().manual_seed(_SEED)
    advantages_R = torch.randn(len(mask), generator=rng, dtype=torch.float64)
    old_T = engine_T + _NOISE * torch.randn(len(engine_T), generator=rng, dtype=torch.float64)
    return LossTokens(
        logprobs_T=engine_T,
        old_logprobs_T=old_T,
        advantages_T=advantages_R[rows_T],
        engine_logprobs_T=engine_T,
        mask_T=torch.ones_like(engine_T),
        rows_T=rows_T,
        columns_T={n: batch.jagged(n).values.cpu()[inside_S] for n in extra if isinstance(batch[n], JaggedColumn)},
        columns_R={n: batch.tensor(n).cpu() for n in extra if isinstance(batch[n], Tensor)},
    )


def _only(tokens: LossTokens, row: int) -> LossTokens:
    mine_T = tokens.rows_T == row
    own: dict[str, Any] = {n: each[mine_T] for n, each in vars(tokens).items() if isinstance(each, Tensor)}
    own["columns_T"] = {name: values_T[mine_T] for name, values_T in tokens.columns_T.items()}
    return replace(tokens, **own)


def _gradient(loss: PolicyLoss, tokens: LossTokens, path: str) -> Tensor:
    logprobs_T = tokens.logprobs_T.clone().requires_grad_()
    given = replace(tokens, logprobs_T=logprobs_T)
    custom_loss(loss, given, tokens.mask_T, path).total.backward()  # type: ignore[no-untyped-call]
    assert logprobs_T.grad is not None
    return logprobs_T.grad

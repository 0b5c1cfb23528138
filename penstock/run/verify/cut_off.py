"""How many tokens a correction or a clip would leave without a gradient in the first step, measured on real tokens."""

from __future__ import annotations

from typing import Any

import torch

from penstock.algorithms.cut_off import CUT_OFFS, MOSTLY
from penstock.algorithms.reduction import MetricAccumulator, numbers
from penstock.config.sections.algorithm import AlgorithmConfig, KlConfig, NoCorrection, ReinforceLoss
from penstock.data_plane import fields
from penstock.run.verify.findings import Check, Finding, Status
from penstock.run.verify.subject import Subject
from penstock.training.objective import policy_objective
from penstock.training.targets import TargetColumns

CUT_OFF = Check(
    "cut_off_tokens",
    "tokens cut off",
    ("masked_fraction", "clipped_negative_fraction", "clipped_positive_fraction", "dual_clipped_fraction", "tokens"),
    "Clipped and masked tokens have no gradient: the more there are, the less the run learns. Engine and "
    "trainer have the same weights here, so the cause is the settings or the log-prob mismatch above.",
)

_NOTABLE = 0.05
"""The share of tokens without a gradient above which to warn: at equal weights there are few."""


async def check_cut_off(subject: Subject) -> Finding:
    """The run's own correction and loss on the sampled tokens, with good and bad responses alternating."""
    algorithm = subject.config.algorithm
    figures: dict[str, Any] = dict.fromkeys(CUT_OFF.figures, 0.0)
    bars = {name: _NOTABLE for name in CUT_OFF.figures if name != "tokens"}
    bar = f"at most {_NOTABLE:.0%} of a kind; fails above {MOSTLY:.0%}"
    if algorithm.old_policy == "trainer" and isinstance(algorithm.correction, NoCorrection):
        figures["tokens"] = sum(tags["response_length"] for meta in subject.sampled.groups for tags in meta.tags)
        return Finding(Status.PASS, "none: no correction, and ratios start at 1", figures, bars, bar)
    metrics, figures["tokens"] = await _metrics(subject, algorithm)
    problems = []
    for name, cause in zip(bars, CUT_OFFS, strict=True):
        figures[name] = cause.share(metrics) or 0.0
        if figures[name] > _NOTABLE:
            problems.append(f"{figures[name]:.0%} {cause.what}: {cause.advice}.")
    shown = f"{figures['masked_fraction']:.0%} masked, {metrics.get('clip_fraction', 0.0):.0%} clipped"
    most = max(figures[name] for name in bars)
    status = Status.FAIL if most > MOSTLY else Status.WARN if problems else Status.PASS
    return Finding(status, shown, figures, bars, bar, " ".join(problems))


async def _metrics(subject: Subject, algorithm: AlgorithmConfig) -> tuple[dict[str, float], int]:
    """What a first step would record, and over how many tokens."""
    meta = subject.sampled.meta
    await subject.training.trainer.compute_logprobs(meta, fields.OLD_LOGPROBS)
    wanted = (fields.TOKEN_MASK, fields.GENERATION_LOGPROBS, fields.OLD_LOGPROBS)
    batch = await subject.data_plane.get_samples_async(meta, wanted)
    mask = batch.jagged(fields.TOKEN_MASK)
    inside_S = mask.values.cpu() > 0
    inside_S[mask.offsets_R1[:-1]] = False  # a row's first token has no prediction
    rows_T = torch.repeat_interleave(mask.lengths_R)[inside_S]
    engine_T, trainer_T = (batch.jagged(name).values.cpu().double()[inside_S] for name in wanted[1:])
    ones_T = torch.ones_like(engine_T)
    targets = TargetColumns(
        mask_T=ones_T,
        weights_T=ones_T,
        rows_T=rows_T,
        advantages_T=1.0 - 2.0 * (rows_T % 2),
        engine_logprobs_T=engine_T,
        lag_T=torch.zeros_like(engine_T),
    )
    plain = algorithm.model_copy(update={"kl": KlConfig(), "entropy_coefficient": 0.0})
    if plain.loss.kind == "custom":
        plain = plain.model_copy(update={"loss": ReinforceLoss()})
    gathered = MetricAccumulator()
    gathered.add(policy_objective(plain, trainer_T, ones_T, targets).metrics)
    return numbers(gathered.reduce(tokens=len(rows_T), sequences=len(set(rows_T.tolist())))), len(rows_T)

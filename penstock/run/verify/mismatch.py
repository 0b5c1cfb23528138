"""Engine against trainer: log-probs of the tokens that the engine sampled must match those the trainer computes."""

from __future__ import annotations

from typing import Any

from penstock.algorithms.losses import LOG_RATIO_LIMIT
from penstock.data_plane import fields
from penstock.data_plane.meta import KVBatchMeta
from penstock.run.verify.findings import Check, Finding, NotChecked, Status, within
from penstock.run.verify.subject import Subject

BARS = {
    "float64": {"mean_abs": 1e-4, "max_abs": 1e-2, "kl": 1e-6},
    "float32": {"mean_abs": 1e-4, "max_abs": 1e-2, "kl": 1e-6},
    "bfloat16": {"mean_abs": 5e-2, "max_abs": 2.0, "kl": 1e-2},
}
"""By dtype. Engines return log-probs in float32, so float64 has no finer bar."""

MISMATCH = Check(
    "logprob_mismatch",
    "log-prob mismatch",
    ("mean_abs", "max_abs", "kl", "tokens", "foreign_versions"),
    "Importance ratios start from engine log-probs that are not the trainer's: the policy gradient is biased from the "
    "first step. Compare with model.dtype=float32 (rounding errors disappear, a bug stays) and "
    "model.attn_implementation=eager; if it is rounding, choose an algorithm.correction such as tis.",
)


async def check_mismatch(subject: Subject) -> Finding:
    """Both sides' log-probs of every sampled token, under the weights that sampled them."""
    truncated = subject.config.rollout.sampling.is_truncated
    notes = ("both sides over the tokens that truncated sampling kept",) if truncated else ()
    return _judged(await _figures(subject, subject.sampled.meta), subject.config.model.dtype, notes)


async def _figures(subject: Subject, meta: KVBatchMeta) -> dict[str, Any]:
    await subject.training.trainer.compute_logprobs(meta, fields.OLD_LOGPROBS)
    wanted = (fields.TOKEN_MASK, fields.GENERATION_LOGPROBS, fields.OLD_LOGPROBS, fields.TOKEN_VERSIONS)
    batch = await subject.data_plane.get_samples_async(meta, wanted)
    inside_S = batch.jagged(fields.TOKEN_MASK).values.cpu() > 0
    # A row's first token has no prediction.
    inside_S[batch.jagged(fields.TOKEN_MASK).offsets_R1[:-1]] = False
    engine_T, trainer_T = (
        batch.jagged(name).values.cpu().double()[inside_S] for name in (fields.GENERATION_LOGPROBS, fields.OLD_LOGPROBS)
    )
    if not len(engine_T):
        raise NotChecked("No response has a second token")
    delta_T = trainer_T - engine_T
    held_T = delta_T.clamp(max=LOG_RATIO_LIMIT)
    served = subject.serving.engines.stats().version
    return {
        "mean_abs": float(delta_T.abs().mean()),
        "max_abs": float(delta_T.abs().amax()),
        "kl": float((held_T.exp() - 1 - held_T).mean()),
        "tokens": len(delta_T),
        "foreign_versions": int((batch.jagged(fields.TOKEN_VERSIONS).values.cpu()[inside_S] != served).sum()),
    }


def _judged(figures: dict[str, Any], dtype: str, notes: tuple[str, ...]) -> Finding:
    limits = BARS[dtype]
    bars = limits | {"foreign_versions": 0}
    over = [name for name in bars if not within(figures, {name: bars[name]})]
    shown = f"mean {figures['mean_abs']:.1e}, max {figures['max_abs']:.1e}, KL {figures['kl']:.1e}"
    bar = f"at most {limits['mean_abs']:.0e}, {limits['max_abs']:.0e}, {limits['kl']:.0e} in {dtype}"
    problem = f"Over the bar on {figures['tokens']:,} tokens: {', '.join(over)}." if over else ""
    return Finding(Status.FAIL if over else Status.PASS, shown, figures, bars, bar, problem, notes)

"""Prompts as the model sees them: rendered, with their token ids."""

from __future__ import annotations

from penstock.data_plane import fields
from penstock.errors import PenstockError
from penstock.rollout.sample_columns import prompt_ids
from penstock.run.verify.findings import SeenPrompt
from penstock.run.verify.subject import Subject


async def asked_prompts(subject: Subject, most: int) -> list[tuple[int, ...]]:
    """What the engine was asked in the first groups; a check that finds none is skipped."""
    prompts = []
    for group in subject.sampled.groups[:most]:
        batch = await subject.data_plane.get_samples_async(group.slice(0, 1), (fields.INPUT_IDS, fields.TOKEN_MASK))
        ids_T, mask_T = (batch.jagged(name).row(0) for name in (fields.INPUT_IDS, fields.TOKEN_MASK))
        prompts.append(prompt_ids(ids_T, mask_T))
    return prompts


async def first_prompt(subject: Subject) -> SeenPrompt | None:
    """The first sampled group's prompt; if there is none, the first in the data, as far as it can be rendered."""
    tokenizer = subject.serving.tokenizer
    if subject.sampled.metas:
        [token_ids] = await asked_prompts(subject, 1)
    else:
        visit = next(iter(subject.training.stream))
        try:
            token_ids = tokenizer.encode_prompt(visit.prompt.content)
        except PenstockError:  # the row of the rollouts says why
            return None
    return SeenPrompt(tokenizer.decode_raw(token_ids), token_ids)

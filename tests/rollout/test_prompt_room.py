"""Prompts that are too long for the engine, as environments meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.errors import OverlongPrompt, PromptTooLong
from penstock.rollout.environments.base import Split
from penstock.rollout.environments.turns.multi_turn import Done, MultiTurnEnvironment, Observation, Turn
from penstock.rollout.handle import SampleHandle
from penstock.rollout.prompt_room import PromptRoom
from penstock.rollout.prompts import Prompt
from tests.rollout.talking import CHAT, Talker, tokenizer

CONTEXT, NEW = 60, 10


class Twice(MultiTurnEnvironment):
    """Asks twice."""

    def prompts(self, split: Split) -> list[Prompt]:
        return []

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        return Done(1.0) if len(turns) > 1 else Observation("more")


def handle_of(talker: Talker, *, truncates: bool) -> SampleHandle:
    return replace(talker.handle(max_new_tokens=NEW), room=PromptRoom(CONTEXT, truncates=truncates))


@pytest.mark.parametrize("template", [None, CHAT], ids=["text", "chat"])
async def test_a_cut_prompt_is_what_the_engine_sees_and_what_the_row_has(template: str | None) -> None:
    talker = Talker(lambda text: "ok", tokenizer(template), max_model_len=CONTEXT + 100)
    handle = handle_of(talker, truncates=True)
    trajectory = await Twice().run(Prompt("1", "x" * 80 + "end"), handle)
    seen = talker.requests[0].prompt_ids
    assert len(seen) == CONTEXT - NEW
    assert trajectory.segments[0].token_ids == seen
    assert handle.prompt_cut
    text = talker.tokens.decode_raw(seen)
    assert text.endswith("end" if template is None else "end<eos>\nassistant: ")


@pytest.mark.parametrize("length", [1, CONTEXT - 1])
async def test_a_prompt_with_room_for_a_token_is_left_as_it_is(length: int) -> None:
    talker = Talker(lambda text: "…", max_model_len=CONTEXT)
    handle = handle_of(talker, truncates=True)
    assert handle.encode_prompt("x" * length) == talker.tokens.encode("x" * length)
    assert not handle.prompt_cut


async def test_a_later_turn_without_room_is_no_overlong_prompt() -> None:
    talker = Talker(lambda text: "ok", max_model_len=CONTEXT)
    handle = handle_of(talker, truncates=False)
    with pytest.raises(OverlongPrompt):
        await handle.generate(talker.tokens.encode("x" * CONTEXT))
    handle = handle_of(talker, truncates=False)
    await handle.generate(talker.tokens.encode("x"))
    with pytest.raises(PromptTooLong) as later:
        await handle.generate(talker.tokens.encode("x" * CONTEXT))
    assert not isinstance(later.value, OverlongPrompt)

"""Multi-turn environments: whose tokens are whose, and how a trajectory ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data_plane import fields
from penstock.data_plane.columns import JaggedColumn
from penstock.errors import ConfigError, EnvironmentFailure, PromptTooLong
from penstock.rollout.engines.base import FinishReason, GenerationRequest
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.environments import Done, MultiTurnEnvironment, Observation, Prompt, Split, Turn
from penstock.rollout.environments.limits import LimitedEnvironment, TurnLimits
from penstock.rollout.handle import HFTokenizer
from penstock.rollout.sample_columns import group_columns
from tests.rollout.talking import (
    ADDS_THOUGHTS,
    CHAT,
    DROPS_THOUGHTS,
    SPACED,
    Talker,
    merging_tokenizer,
    tagging_tokenizer,
    tokenizer,
)
from tests.support.tiny_models import char_tokenizer

PROMPT = Prompt("7", "go")


class Echo(MultiTurnEnvironment):
    """Repeats the model's words until it says `end`."""

    max_turns = 3

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        word = turns[-1].response
        return Done(1.0) if word == "end" else Observation(f"[{word}]")

    def unfinished(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        return -0.5


def shown(talker: Talker, trajectory: Any) -> list[tuple[bool, str]]:
    return [(s.generation is not None, talker.tokens.decode_raw(s.token_ids)) for s in trajectory.segments]


async def test_turns_alternate_and_only_the_models_are_generated() -> None:
    talker = Talker(lambda text: "end" if "[a]" in text else "a")
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert shown(talker, trajectory) == [(False, "go"), (True, "a<eos>"), (False, "[a]"), (True, "end<eos>")]
    assert (trajectory.reward, trajectory.truncated, trajectory.length) == (1.0, False, 6)
    assert trajectory.response_text == "a[a]end"
    assert [request.request_id for request in talker.requests] == ["grp_g0_t0", "grp_g0_t1"]
    assert len({request.seed for request in talker.requests}) == 2


async def test_the_chat_template_speaks_between_turns_and_the_models_end_of_turn_is_not_repeated() -> None:
    talker = Talker(lambda text: "end" if "[a]" in text else "a", tokenizer(CHAT))
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert shown(talker, trajectory) == [
        (False, "user: go<eos>\nassistant: "),
        (True, "a<eos>"),
        (False, "\nuser: [a]<eos>\nassistant: "),
        (True, "end<eos>"),
    ]


async def test_words_that_a_template_would_trim_stay_as_the_model_wrote_them() -> None:
    trims = CHAT.replace("message.content", "message.content | trim")
    talker = Talker(lambda text: "end" if "[" in text else "  a \n", tokenizer(trims))
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert shown(talker, trajectory)[1] == (True, "  a \n<eos>")
    assert shown(talker, trajectory)[2] == (False, "\nuser: [  a \n]<eos>\nassistant: ")


async def test_a_template_that_drops_earlier_reasoning_is_refused() -> None:
    talker = Talker(lambda text: "<think>hm</think>a", tokenizer(DROPS_THOUGHTS))
    with pytest.raises(EnvironmentFailure, match="renders earlier turns differently"):
        await Echo().run(PROMPT, talker.handle())
    talker = Talker(lambda text: "end" if "[a]" in text else "a", tokenizer(DROPS_THOUGHTS))
    assert (await Echo().run(PROMPT, talker.handle())).reward == 1.0


async def test_white_space_that_a_template_puts_around_the_models_words_is_no_change_of_them() -> None:
    talker = Talker(lambda text: "end" if text.count("[a]") == 2 else "a", tokenizer(SPACED))
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert shown(talker, trajectory) == [
        (False, "[INST] go [/INST]"),
        (True, "a<eos>"),
        (False, "[INST] [a] [/INST]"),
        (True, "a<eos>"),
        (False, "[INST] [a] [/INST]"),
        (True, "end<eos>"),
    ]


async def test_variables_for_the_template_are_given_to_it_for_every_turn() -> None:
    hf = char_tokenizer()
    hf.chat_template = "{{ mark }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ mark }}{% endfor %}assistant: "
    tokens = HFTokenizer(hf, chat_template=True, template_kwargs={"mark": "#"})
    talker = Talker(lambda text: "end" if "[a]" in text else "a", tokens)
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert [text for own, text in shown(talker, trajectory) if not own] == [
        "#user: go#assistant: ",
        "#user: [a]#assistant: ",
    ]


async def test_a_template_that_puts_words_into_the_models_mouth_is_refused_as_that() -> None:
    talker = Talker(lambda text: "a", tokenizer(ADDS_THOUGHTS))
    with pytest.raises(EnvironmentFailure, match="puts '<think></think>' in front of an earlier turn"):
        await Echo().run(PROMPT, talker.handle())


async def test_a_prompt_begins_as_in_an_environment_of_one_turn() -> None:
    talker = Talker(lambda text: "end", tagging_tokenizer(opens=True))
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert trajectory.segments[0].token_ids == talker.tokens.encode_prompt("go")
    assert shown(talker, trajectory)[0] == (False, "<bos>go")


async def test_a_chat_is_refused_where_the_run_uses_no_chat_template() -> None:
    chat = Prompt("7", "go", messages=({"role": "user", "content": "go"},))
    with pytest.raises(ConfigError, match=r"data\.chat_template: must be true"):
        await Echo().run(chat, Talker(lambda text: "end").handle())


class Tagged(Echo):
    """Wants its words in tags."""

    turn_ends = ("</w>",)

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        word = turns[-1].response
        return Done(1.0) if word == "<w>end</w>" else Observation(f"<r>{word}</r>")


async def test_tags_that_are_special_tokens_are_words_like_others() -> None:
    tokens = tagging_tokenizer("<w>", "</w>", "<r>", "</r>")
    talker = Talker(lambda text: "<w>end</w>" if "<r>" in text else "<w>a</w>", tokens)
    trajectory = await Tagged().run(PROMPT, talker.handle())
    assert (trajectory.reward, trajectory.response_text) == (1.0, "<w>a</w><r><w>a</w></r><w>end</w>")
    assert talker.requests[0].sampling.stop_token_ids == {1, *tokens.encode("</w>")}


async def test_a_special_token_that_ends_every_response_is_not_a_word() -> None:
    tokens = tagging_tokenizer("<end_of_turn>", "</w>")
    talker = Talker(lambda text: "", tokens)
    handle = talker.handle()
    [end], [tag] = tokens.encode("<end_of_turn>"), tokens.encode("</w>")
    handle.sampling = replace(handle.sampling, stop_token_ids=frozenset({1, end}))
    assert handle.decode((*tokens.encode("a</w>"), end, 1, 0)) == "a</w>"
    handle.sampling = replace(handle.sampling, stop_token_ids=frozenset({1, tag}))
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop_token_ids: '</w>' ends every response"):
        await Tagged().run(PROMPT, handle)


async def test_too_many_turns_end_without_a_further_reply() -> None:
    talker = Talker(lambda text: "a")
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert [generated for generated, _ in shown(talker, trajectory)] == [False, True, False, True, False, True]
    assert (trajectory.reward, trajectory.truncated) == (-0.5, False)


async def test_a_turn_cut_off_by_its_limit_ends_as_truncated() -> None:
    trajectory = await Echo().run(PROMPT, Talker(lambda text: "a…").handle())
    assert (trajectory.reward, trajectory.truncated, len(trajectory.segments)) == (-0.5, True, 2)


async def test_a_conversation_without_room_for_a_turn_ends_as_truncated_not_as_a_failure() -> None:
    talker = Talker(lambda text: "abc", max_model_len=10)
    trajectory = await Echo().run(PROMPT, talker.handle())
    assert shown(talker, trajectory) == [(False, "go"), (True, "abc<eos>")]
    assert (trajectory.reward, trajectory.truncated) == (-0.5, True)
    with pytest.raises(PromptTooLong):
        await Echo().run(PROMPT, Talker(lambda text: "abc", max_model_len=2).handle())


async def test_a_turn_ends_at_a_text_of_one_token_or_of_several() -> None:
    class Stops(Echo):
        turn_ends = ("]", "end", "€")

    talker = Talker(lambda text: "end")
    await Stops().run(PROMPT, talker.handle())
    sampling = talker.requests[0].sampling
    assert sampling.stop_token_ids == {1, *talker.tokens.encode("]")}
    assert sampling.stop == ("]", "end", "€")


async def test_a_text_in_place_of_several_is_refused_as_each_letter_would_end_a_turn() -> None:
    class Stops(Echo):
        turn_ends = "</w>"  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"turn_ends is the text '</w>', not a tuple .*write \(\"</w>\",\)"):
        await Stops().run(PROMPT, Talker(lambda text: "end").handle())


async def test_a_turn_can_be_shorter_but_never_longer_than_the_runs_limit() -> None:
    talker = Talker(lambda text: "a")
    for asked, limit in ((None, 50), (7, 7), (70, 50)):
        await talker.handle().generate((5,), max_new_tokens=asked)
        assert talker.requests[-1].sampling.max_new_tokens == limit


class Scripted(MultiTurnEnvironment):
    """Replies what it is told to, then ends."""

    max_turns = 100

    def __init__(self, replies: list[str]) -> None:
        self._replies = replies

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        return Observation(self._replies[len(turns) - 1]) if len(turns) <= len(self._replies) else Done(0.0)


WORDS = st.text(alphabet="ab <>/é\n", max_size=12)
A, B, LAST = 3, 4, 41
TOKENS = st.lists(st.one_of(st.sampled_from([A, B]), st.integers(2, LAST)), min_size=1, max_size=8)


def test_the_tokenizer_of_the_property_reads_other_ids_than_it_wrote() -> None:
    tokens = merging_tokenizer()
    assert tokens.encode(tokens.decode((A, B, A))) != (A, B, A)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(TOKENS, st.booleans(), WORDS), min_size=1, max_size=6),
    template=st.sampled_from([None, CHAT]),
)
def test_rows_are_what_the_engine_saw_token_by_token(
    turns: list[tuple[list[int], bool, str]], template: str | None
) -> None:
    """Whatever ids the model draws (few survive decoding and encoding) and whatever the environment says."""
    tokens = merging_tokenizer(template)
    drawn = [(*ids, 1) if ends else tuple(ids) for ids, ends, _ in turns]
    seen: list[tuple[int, ...]] = []

    def script(request: GenerationRequest) -> ScriptedResponse:
        seen.append(request.prompt_ids)
        return ScriptedResponse(0.0, drawn[len(seen) - 1], FinishReason.STOP)

    talker = Talker(lambda text: "", tokens)
    talker.engine = ScriptedEngine(script, version=4)
    environment = LimitedEnvironment(Scripted([reply for *_, reply in turns[:-1]]), TurnLimits(1, 5))
    trajectory = asyncio.run(environment.run(PROMPT, talker.handle()))

    columns = group_columns([trajectory])
    row = {name: column.row(0).tolist() for name, column in columns.items() if isinstance(column, JaggedColumn)}
    ids, mask = row[fields.INPUT_IDS], row[fields.TOKEN_MASK]
    trained = [place for place, kept in enumerate(mask) if kept]
    position = 0
    for context, generated in zip(seen, drawn, strict=True):
        assert tuple(ids[: len(context)]) == context
        assert tuple(ids[len(context) : len(context) + len(generated)]) == generated
        assert not any(mask[position : len(context)])
        position = len(context) + len(generated)
        assert all(mask[len(context) : position])
    assert position == len(ids)
    assert len(trained) == sum(map(len, drawn)) == trajectory.length
    for place, kept in enumerate(mask):
        expected = (-1.0, 4) if kept else (0.0, -1)
        assert (row[fields.GENERATION_LOGPROBS][place], row[fields.TOKEN_VERSIONS][place]) == expected

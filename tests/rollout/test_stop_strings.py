"""What environments see of responses that a stop string ended, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.rollout.engines.base import FinishReason, GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.embedded import EmbeddedEngine
from penstock.rollout.engines.stop_strings import stop_watch
from penstock.rollout.environments import Done, MultiTurnEnvironment, Observation, Prompt, Split, Turn
from penstock.rollout.environments.limits import LimitedEnvironment, TurnLimits
from penstock.rollout.handle import HFTokenizer, SampleHandle
from tests.rollout.talking import CHAT, tokenizer
from tests.support.tiny_models import bpe_tokenizer, char_tokenizer, tiny_model

PROMPT = Prompt("7", "go")


class Reciting:
    """An engine that recites a text for each request, and ends where the request's stop strings say."""

    def __init__(self, tokens: HFTokenizer, *texts: str) -> None:
        self._tokens, self._texts = tokens, iter(texts)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        watch = stop_watch(self._tokens.texts, request.sampling.stop) if request.sampling.stop else None
        ids, stop = [], None
        for token in (*self._tokens.encode(next(self._texts)), 1):
            ids.append(token)
            stop = None if watch is None else watch.push(token)
            if stop is not None:
                break
        logprobs = tuple(-float(place) for place in range(len(ids)))
        return GenerationResult(request.request_id, tuple(ids), logprobs, (0,) * len(ids), FinishReason.STOP, stop)

    def handle(self, *stop: str) -> SampleHandle:
        sampling = SamplingParams(50, stop_token_ids=frozenset({1}), stop=stop)
        engine: Any = self
        return SampleHandle(engine, self._tokens, sampling, "grp", "grp_g0", seed=0, timeout_seconds=5)


def merged_tokenizer() -> HFTokenizer:
    """A byte-level tokenizer with `>!` as one token."""
    hf = bpe_tokenizer()
    hf.add_tokens([">!"])
    return HFTokenizer(hf)


async def test_a_text_ends_with_its_stop_string_and_the_tokens_with_the_one_that_completes_it() -> None:
    tokens = merged_tokenizer()
    handle = Reciting(tokens, "<a>6</a>! and more").handle("</a>")
    generation = await handle.generate(tokens.encode("go"))
    assert tokens.decode_raw(generation.token_ids) == "<a>6</a>!", "the last token goes on beyond the stop string"
    assert handle.decode(generation.token_ids) == "<a>6</a>"
    assert handle.decode((*generation.token_ids, *generation.token_ids)) == 2 * "<a>6</a>!", "other tokens are as read"


async def test_a_turn_adds_its_own_stop_strings_to_those_of_the_run() -> None:
    engine = Reciting(tokenizer(), "abcd", "abcd")
    handle = engine.handle("d", "c")
    first = await handle.generate((5,), stop=("b", "c"))
    second = await handle.generate((5,))
    assert [handle.decode(one.token_ids) for one in (first, second)] == ["ab", "abc"]
    assert [one.sampling.stop for one in engine.requests] == [("d", "c", "b"), ("d", "c")]
    with pytest.raises(TypeError, match=r"stop is the text 'b', not a tuple"):
        await handle.generate((5,), stop="b")


class Tags(MultiTurnEnvironment):
    """Answers each question in tags; remembers what it saw."""

    turn_ends = ("</q>",)

    def __init__(self) -> None:
        self.seen: list[str] = []

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
        self.seen.append(turns[-1].response)
        return Observation("[yes]") if turns[-1].response.endswith("</q>") else Done(1.0)


@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
async def test_a_turn_ends_at_a_tag_of_several_tokens(template: str | None) -> None:
    """Within the limits that environments of one's own have, too."""
    tokens, environment = tokenizer(template), Tags()
    engine = Reciting(tokens, "<q>a</q><q>b</q>", "done")
    trajectory = await LimitedEnvironment(environment, TurnLimits(1, 5.0)).run(PROMPT, engine.handle())
    assert environment.seen == ["<q>a</q>", "done"]
    assert (trajectory.reward, trajectory.truncated) == (1.0, False)
    shown = [tokens.decode_raw(segment.token_ids) for segment in trajectory.segments]
    between = "[yes]" if template is None else "<eos>\nuser: [yes]<eos>\nassistant: "
    assert shown[1:] == ["<q>a</q>", between, "done<eos>"]


async def test_words_of_the_template_that_the_model_stopped_at_are_not_said_twice() -> None:
    """The model wrote the beginning of the user's turn, as the template does."""

    class Asks(Tags):
        async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
            return Observation("b") if len(turns) == 1 else Done(1.0)

    tokens = tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    engine = Reciting(tokens, "a\nuser: x", "done")
    trajectory = await Asks().run(PROMPT, engine.handle("\nuser:"))
    shown = [tokens.decode_raw(segment.token_ids) for segment in trajectory.segments]
    assert shown == ["user: go\nassistant: ", "a\nuser:", " b\nassistant: ", "done<eos>"]


async def test_turns_of_a_real_engine_end_at_the_environments_texts() -> None:
    """No turn of a random model goes on behind one."""

    class Short(Tags):
        turn_ends = ("e", "sw")

        async def step(self, prompt: Prompt, turns: Sequence[Turn]) -> Observation | Done:
            return Done(1.0)

    hf = char_tokenizer("</calc>answergo")
    tokens = HFTokenizer(hf)
    model = tiny_model(vocabulary=len(hf))
    engine = EmbeddedEngine(model, max_num_seqs=4, max_model_len=96, threads=1, texts=lambda: tokens.texts)
    try:
        texts = []
        for seed in range(8):
            sampling = SamplingParams(30, stop_token_ids=frozenset({1}))
            handle = SampleHandle(engine, tokens, sampling, "grp", f"s{seed}", seed=seed, timeout_seconds=30)
            texts.append((await Short().run(PROMPT, handle)).response_text)
    finally:
        await engine.close()
    for text in texts:
        assert text.find("e") in (-1, len(text) - 1)
        assert text.find("sw") in (-1, len(text) - 2)
    assert sum(text.endswith(("e", "sw")) for text in texts) >= 4

"""A response ends at the first token at which its text contains a stop string, whatever the tokenizer."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, PreTrainedTokenizerFast

from penstock.rollout.engines.base import FinishReason
from penstock.rollout.engines.embedded.requests import InvalidRequest
from penstock.rollout.engines.stop_strings import (
    PiecesWatch,
    TokenTexts,
    WindowWatch,
    cut_after,
    first_stop,
    stop_watch,
)
from penstock.rollout.handle import HFTokenizer
from tests.engines.helpers import Gate, generate_all, mixed_requests, pause_within, published, request, running_engine
from tests.support.tiny_models import bpe_tokenizer, char_tokenizer, tiny_model

WORDS = ("a", "b", " ", "ab", "</", "a>", "▁", "é", "€", "😀", "\n", ".", " .", "'s", "aa")


def byte_level() -> Any:
    """Byte-level BPE: every byte is a token, so that characters come in parts."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_tokens([AddedToken("</calc>", special=True), AddedToken("Ġé x", special=False)])
    return tokenizer


def byte_fallback() -> Any:
    """In the manner of Llama 2: a space at the beginning is dropped, and of bytes in a row all or none are text."""
    from tokenizers import Tokenizer, decoders, models

    pieces = [
        "<pad>",
        "<eos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "</",
        "a>",
        "é",
    ]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(bpe)


def word_pieces() -> Any:
    """In the manner of BERT: words are parted by spaces unless they say otherwise, and spaces are cleaned up."""
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<pad>", "<eos>", "<unk>", "a", "##a", "b", "##b", ".", ",", "'", "s", "n't", "do", "##</", "é", "not"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return _fast(tokenizer, cleans=True)


def unigrams() -> Any:
    """In the manner of T5."""
    from tokenizers import Tokenizer, decoders, models

    pieces = [
        ("<pad>", 0.0),
        ("<eos>", 0.0),
        ("<unk>", 0.0),
        *((piece, -1.0) for piece in ("▁", "▁a", "a", "b", "é.", "▁▁")),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.decoder = decoders.Metaspace()
    return _fast(tokenizer)


def _fast(tokenizer: Any, *, cleans: bool = False) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=cleans,
    )


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_pieces": word_pieces,
    "unigrams": unigrams,
    "characters": char_tokenizer,
}


@functools.cache
def tokens_of(kind: str) -> HFTokenizer:
    return HFTokenizer(KINDS[kind]())


def by_brute_force(tokens: HFTokenizer, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
    """Decode every prefix as environments do; where the first one contains a stop string, how long it is, and its text
    up to there."""
    for length in range(1, len(ids) + 1):
        text = tokens.decode(ids[:length], frozenset())
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if ends:
            return length, text[: min(ends)]
    return None


def by_watch(tokens: HFTokenizer, ids: Sequence[int], watch: Any) -> tuple[int, str] | None:
    for length, token in enumerate(ids, start=1):
        if (stop := watch.push(token)) is not None:
            return length, cut_after(tokens.decode(ids[:length], frozenset()), stop)
    return None


@st.composite
def watched(draw: st.DrawFn) -> tuple[str, list[int], list[str]]:
    """A tokenizer, a response, and stop strings, most of which are pieces of some text of it."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    tokens = tokens_of(kind)
    rng = random.Random(draw(st.integers(0, 2**32)))
    size = len(tokens._tokenizer)
    few = rng.sample(range(size + 2), min(size, rng.choice((3, 8, 40, size))))
    ids = [rng.choice(few) for _ in range(rng.choice((5, 40, 150)))]
    stops = []
    for _ in range(rng.randint(1, 4)):
        end = rng.randint(1, len(ids))
        text = tokens.decode(ids[max(0, end - rng.choice((1, 2, 5, 20))) : end], frozenset()).replace("\ufffd", "")
        begin = rng.randint(0, len(text))
        stops.append(text[begin : begin + rng.choice((1, 2, 4, 30))] or rng.choice(WORDS))
    return kind, ids, stops


@settings(max_examples=400, deadline=None)
@given(watched())
def test_a_watch_finds_what_decoding_every_prefix_finds(case: tuple[str, list[int], list[str]]) -> None:
    kind, ids, stops = case
    tokens = tokens_of(kind)
    expected = by_brute_force(tokens, ids, stops)
    assert by_watch(tokens, ids, stop_watch(tokens.texts, stops)) == expected
    assert by_watch(tokens, ids, WindowWatch(tokens.texts, stops)) == expected, "by decoding, too"


def test_byte_level_tokenizers_are_read_by_their_bytes() -> None:
    assert isinstance(stop_watch(tokens_of("byte_level").texts, ["a"]), PiecesWatch)
    for kind in KINDS.keys() - {"byte_level"}:
        assert isinstance(stop_watch(tokens_of(kind).texts, ["a"]), WindowWatch)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 305), max_size=30))
def test_the_pieces_of_a_byte_level_tokenizer_make_its_text(ids: list[int]) -> None:
    tokens = tokens_of("byte_level")
    pieces = tokens.texts.pieces
    assert pieces is not None
    joined = b"".join(pieces[token] if token < len(pieces) else b"" for token in ids)
    assert joined.decode(errors="replace") == tokens.decode(ids, frozenset())


def test_a_window_stays_short_however_long_the_response() -> None:
    """Also where no byte ever becomes a character."""
    decoded: list[int] = []

    class Counting:
        pieces = None

        def __init__(self, texts: TokenTexts) -> None:
            self._texts = texts

        def is_silent(self, token: int) -> bool:
            return self._texts.is_silent(token)

        def text(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return self._texts.text(token_ids)

    for kind, ids in (
        ("characters", [5, 6, 7]),
        ("byte_fallback", [3 + 0xFF]),
        ("byte_fallback", [3 + 0xC3, 3 + 0xA9]),
    ):
        watch = WindowWatch(Counting(tokens_of(kind).texts), ["never", "x" * 20])
        for token in ids * (1500 // len(ids)):
            assert watch.push(token) is None
    assert max(decoded) <= 4 * (20 + 16)


def test_the_stop_string_that_ends_first_is_the_one() -> None:
    assert first_stop("one two", ["two", "ne", "one"]) == "one", "of two that end together, the longer"
    assert first_stop("abc", ["bc", "b"]) == "b"
    assert first_stop("abc", ["x"]) is None
    assert cut_after("a</a>b</a>", "</a>") == "a</a>"


# In the engine


def stopping_engine(tokens: HFTokenizer, model: Any = None, **options: Any) -> Any:
    return running_engine(
        model or tiny_model(vocabulary=len(tokens._tokenizer) + 3), texts=lambda: tokens.texts, **options
    )


def stops_within(tokens: HFTokenizer, token_ids: Sequence[int], at: int) -> str:
    """Two characters of a response, around the end of a token."""
    text, length = tokens.decode(token_ids, frozenset()), len(tokens.decode(token_ids[:at], frozenset()))
    return text[max(0, length - 1) : length + 1]


@pytest.mark.parametrize("kind", ["characters", "byte_level"])
async def test_a_response_ends_with_the_token_that_completes_a_stop_string(kind: str) -> None:
    """Rows with stop strings come and go between others, on the plain path."""
    tokens = tokens_of(kind)
    free = mixed_requests(12, temperature=1.3)
    async with stopping_engine(tokens, max_num_seqs=5) as engine:
        plain = await generate_all(engine, free)
        stops = [stops_within(tokens, result.token_ids, len(result.token_ids) // 2) for result in plain]
        stops = [stop if stop.strip("\ufffd") == stop and stop else "a" for stop in stops]
        asked = [
            request(f"s{i}", one.prompt_ids, one.sampling.max_new_tokens, one.seed, temperature=1.3, stop=(stops[i],))
            for i, one in enumerate(free)
        ]
        mixed = await generate_all(engine, [each for pair in zip(asked, free, strict=True) for each in pair])
    ended = 0
    for result, again, whole, stop in zip(mixed[::2], mixed[1::2], plain, stops, strict=True):
        assert again.token_ids == whole.token_ids, "those without stop strings are as they were"
        found = by_brute_force(tokens, whole.token_ids, [stop])
        length = len(whole.token_ids) if found is None else found[0]
        ended += found is not None
        assert result.token_ids == whole.token_ids[:length]
        assert result.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)
        assert result.stop_string == (None if found is None else stop)
        assert result.finish_reason is (FinishReason.LENGTH if found is None else FinishReason.STOP)
    assert ended >= 6


async def test_a_stop_string_on_the_last_allowed_token_is_a_stop_and_a_stop_token_comes_before_it() -> None:
    tokens = tokens_of("characters")
    async with stopping_engine(tokens) as engine:
        free = await engine.generate(request(new=6))
        text = tokens.decode(free.token_ids, frozenset())
        last = await engine.generate(request(new=6, stop=(text,)))
        token = free.token_ids[0]
        both = await engine.generate(request(new=6, stop=(text[0],), stop_token_ids=frozenset({token})))
    assert (last.token_ids, last.finish_reason) == (free.token_ids, FinishReason.STOP)
    assert (both.token_ids, both.stop_string, both.finish_reason) == ((token,), None, FinishReason.STOP)


async def test_a_stop_string_is_found_across_a_weight_update() -> None:
    """Its first character is of the old weights, its second of the new ones."""
    tokens = tokens_of("characters")

    async def interrupted(stop: tuple[str, ...]) -> Any:
        served = tiny_model(vocabulary=105)
        gate = Gate(served, step=4)
        async with stopping_engine(tokens, served, max_num_seqs=1) as engine:
            waiting = asyncio.ensure_future(engine.generate(request(new=8, seed=3, stop=stop)))
            await pause_within(engine, gate)
            await engine.update_weights(published(tiny_model(vocabulary=105, seed=1), 1))
            await engine.resume()
            return await waiting

    free = await interrupted(())
    changed = free.token_versions.index(1)
    stop = tokens.decode(free.token_ids[changed - 1 : changed + 1], frozenset())
    stopped = await interrupted((stop,))
    assert len(stop) == 2
    assert stopped.token_ids == free.token_ids[: changed + 1]
    assert stopped.stop_string == stop


async def test_stop_strings_need_a_tokenizer_and_must_be_text() -> None:
    async with running_engine() as engine:
        with pytest.raises(InvalidRequest, match="without a tokenizer"):
            await engine.generate(request(stop=("a",)))
    async with stopping_engine(tokens_of("characters")) as engine:
        for stop, why in (("", "is empty"), ("a\ufffd", "U\\+FFFD"), ("\ud800", "surrogate")):
            with pytest.raises(InvalidRequest, match=why):
                await engine.generate(request(stop=(stop,)))

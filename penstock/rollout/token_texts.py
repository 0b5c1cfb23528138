"""How the tokens of a Hugging Face tokenizer read, for code that looks at a response token by token."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any

_CLEANS_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


class HFTokenTexts:
    """Implements `TokenTexts`: texts as environments see them, so without the tokens in `silent`.

    Everything is made when it is first asked for, in the thread that asks.
    """

    def __init__(self, tokenizer: Any, silent: AbstractSet[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = silent

    def is_silent(self, token: int) -> bool:
        """Whether the token adds nothing to the text; also true of tokens that only pad the model's vocabulary."""
        return token in self._silent or token >= self._end

    @cached_property
    def pieces(self) -> Sequence[bytes] | None:
        """The bytes of each token of a byte-level tokenizer; else None."""
        if not _is_byte_level(self._tokenizer):
            return None
        word = self._tokenizer.backend_tokenizer.id_to_token
        return [b"" if self.is_silent(token) else _piece(word(token)) for token in range(self._end)]

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, none of them silent."""
        return str(self._own_tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def _end(self) -> int:
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @cached_property
    def _own_tokenizer(self) -> Any:
        """A copy, since calls in other threads may change a fast tokenizer's settings, and then refuse to share it."""
        return copy.deepcopy(self._tokenizer)


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a text is the bytes of its tokens, one after the other, and nothing is done to it."""
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or (kind.decode, kind._decode) != (
        PreTrainedTokenizerBase.decode,
        PreTrainedTokenizerFast._decode,
    ):
        return False
    backend = tokenizer.backend_tokenizer
    # transformers leaves the text of BPE tokenizers alone, regardless of the first of these settings.
    as_it_is = isinstance(backend.model, models.BPE) and not getattr(tokenizer, _CLEANS_BPE, True)
    return isinstance(backend.decoder, decoders.ByteLevel) and (not tokenizer.clean_up_tokenization_spaces or as_it_is)


def _byte_characters() -> dict[int, int]:
    """The bytes by the characters that stand for them in byte-level vocabularies: printable ones for themselves, the
    others as characters from 256 on. The characters below 256 that stand for no byte get one that no byte has."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {256 + place: byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()


def _piece(word: str | None) -> bytes:
    """The bytes of a token; one with a character that stands for no byte is text as it is written."""
    if word is None:
        return b""
    try:
        return word.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return word.encode()

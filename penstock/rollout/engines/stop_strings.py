"""Ending a response as soon as its text contains a stop string.

A response's text is what all of its tokens decode to together: a stop string may span tokens, begin or end inside of
one, or be cut apart by characters whose bytes are separate tokens. A watch gets each token as it is drawn and says at
which of them the text contains a stop string for the first time. It depends on the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Text = TypeVar("Text", str, bytes)

NOT_TEXT = "\ufffd"
"""Stands in a text for bytes that are not a character, or not yet."""
_SLACK = 16
"""Extra characters that a window has before a stop string: if decoding begins in the middle of a text, its first
characters may read differently (a space is dropped, a character's first byte is missing)."""
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8."""


class TokenTexts(Protocol):
    """How the tokens of a response read."""

    def is_silent(self, token: int) -> bool:
        """Whether the token adds nothing to the text."""

    @property
    def pieces(self) -> Sequence[bytes] | None:
        """The bytes of each token, if the text of any tokens is their concatenated bytes, read as UTF-8; a silent token
        has none. None for tokenizers that put texts together in other ways."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, none of them silent."""


class StopWatch(Protocol):
    """Follows one response."""

    def push(self, token: int) -> str | None:
        """Take the next token; returns the stop string that the text now contains, which ends the response."""


def stop_watch(texts: TokenTexts, stops: Sequence[str]) -> StopWatch:
    """A watch for a response that begins."""
    return PiecesWatch(texts.pieces, stops) if texts.pieces is not None else WindowWatch(texts, stops)


def first_stop(text: Text, stops: Sequence[Text]) -> Text | None:
    """The stop string that ends first in the text; of several that end at the same place, the longest."""
    found = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[2] if found else None


def cut_after(text: str, stop: str) -> str:
    """The text up to and including its first `stop`."""
    before, found, _ = text.partition(stop)
    return before + found


def wrong_stop(stop: object) -> str | None:
    """Why something cannot be a stop string; None if it can."""
    if not isinstance(stop, str):
        return f"is {type(stop).__name__}, not text"
    if not stop:
        return "is empty, and every text contains it"
    if NOT_TEXT in stop:
        return "has U+FFFD, which stands for bytes that are not text"
    try:
        stop.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair, which no text has"
    return None


class PiecesWatch:
    """For tokens that are bytes, as in byte-level BPE: looks at the bytes, and decodes nothing.

    A stop string is in the text exactly when its bytes are in the tokens' bytes: in UTF-8, no character's bytes are
    part of another's, and bytes that are not a character end where the next one begins.

    Invariant: `_tail` holds the last bytes, one fewer than the longest stop string has, and no stop string.

    Worked example, with the stop string `</a>`: `x</` leaves the tail `x</`; `a>y` makes it `x</a>y`, which ends the
    response.
    """

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str]) -> None:
        self._pieces = pieces
        self._stops = [stop.encode() for stop in stops]
        self._kept = max(map(len, self._stops)) - 1
        self._tail = b""

    def push(self, token: int) -> str | None:
        """Take the next token; one that the tokenizer does not have has no bytes."""
        piece = self._pieces[token] if token < len(self._pieces) else b""
        seen = self._tail + piece
        for stop in self._stops:
            if stop in seen:
                found = first_stop(seen, self._stops)
                assert found is not None
                return found.decode()
        self._tail = seen[-self._kept :] if self._kept else b""
        return None


class WindowWatch:
    """For any tokenizer whose text changes at its end only: decodes the last few tokens and, if they contain a stop
    string, everything.

    The window begins where a text was whole once, so not between the bytes of a character, and has more characters
    before the newest token than the longest stop string. What it contains is looked for in the whole text, because its
    own first characters may read differently there.

    Invariants: `_start <= _next`, both places where the text was whole; the window's text up to `_next` has
    `_before_next` characters; no earlier text contained a stop string.

    Worked example, with characters as tokens and the stop string `ab`, so 18 characters of reach: the window begins at
    0 until 18 characters follow `_next` = 1, the first place where the text was whole; then it begins at 1 and `_next`
    is 19, and so on: between 19 and 36 characters are decoded for each token.
    """

    def __init__(self, texts: TokenTexts, stops: Sequence[str]) -> None:
        self._texts, self._stops = texts, stops
        self._reach = max(map(len, stops)) + _SLACK
        self._ids: list[int] = []
        self._start = self._next = self._before_next = 0
        self._broken = 0
        """How many of the last tokens left a text that was not whole."""

    def push(self, token: int) -> str | None:
        """Take the next token."""
        if self._texts.is_silent(token):
            return None
        self._ids.append(token)
        text = self._texts.text(self._ids[self._start :])
        if first_stop(text, self._stops) is not None:
            return first_stop(self._texts.text(self._ids), self._stops)
        # Bytes that have not become a character by then are none, and will not change what follows them.
        self._broken = self._broken + 1 if text.endswith(NOT_TEXT) else 0
        if self._broken % _LONGEST_CHARACTER == 0:
            self._move_window(text)
        return None

    def _move_window(self, text: str) -> None:
        """Here the text is whole."""
        if self._next == self._start:
            self._next, self._before_next = len(self._ids), len(text)
        elif len(text) - self._before_next >= self._reach:
            self._start, self._next = self._next, len(self._ids)
            self._before_next = len(self._texts.text(self._ids[self._start :]))

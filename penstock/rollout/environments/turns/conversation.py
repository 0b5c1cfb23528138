"""A conversation as the engine sees it: token ids that only ever grow at their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import EnvironmentFailure
from penstock.rollout.engines.base import FinishReason, GenerationResult
from penstock.rollout.environments.base import GenerationHandle, Segment
from penstock.rollout.prompts import Message


@dataclass(frozen=True)
class _OwnTurn:
    """One turn of the model: what it wrote, and what stands for it when the chat is rendered."""

    generation: GenerationResult
    message: Message
    """The turn as reported to the environment."""
    stand_in: str


class Conversation:
    """Turns of the model and of the environment, one after the other.

    The model's token ids are kept as it generated them; its text is never encoded again. What the environment says is
    encoded separately. With a chat template the words between two turns of the model are those that the template puts
    there: the chat is rendered with a stand-in for each of the model's turns, the text must begin with everything that
    was rendered before, and what is new at its end is encoded. A template that changes earlier turns is refused.

    Invariant: `ids` at the time of a generation is a prefix of `ids` at any later time.

    Worked example, with a template that writes `<u>text</s><a>`:

        open([user "2*3?"])              ids: <u>2*3?</s><a>
        add(generation "calc</s>")       ids: … calc</s>
        reply([user "6"])                rendered: <u>2*3?</s><a>STAND-IN</s><u>6</s><a>
                                         new text </s><u>6</s><a>; the model wrote </s> itself: <u>6</s><a> is added
    """

    def __init__(self, handle: GenerationHandle) -> None:
        self._handle = handle
        self.segments: list[Segment] = []
        self.messages: list[Message] = []
        self._turns: list[_OwnTurn] = []
        self._between: list[str] = []
        """Rendered text before each of the model's turns; it includes an end of turn that the model wrote itself."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything so far, as the engine sees it."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def generations(self) -> int:
        """How many turns the model has had."""
        return len(self._turns)

    @property
    def tool_calls(self) -> int:
        """How many tools the model has called, in all of its turns."""
        return sum(len(turn.message.get("tool_calls") or ()) for turn in self._turns)

    def open(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> None:
        """Begin, or begin again, with a chat that the model should continue."""
        self.segments = []
        self.messages = list(messages)
        text = self._handle.render_chat(self.messages, tools)
        self._between = [text]
        self.open_ids(self._handle.fit_prompt(self._handle.encode(text)))

    def open_ids(self, token_ids: Sequence[int]) -> None:
        """Begin with a prompt that is not a chat."""
        self.segments.append(Segment(tuple(token_ids)))

    def add(self, generation: GenerationResult, message: Message | None = None) -> None:
        """The model's turn; `message` is how a chat's later requests will quote it."""
        text = self._handle.decode(generation.token_ids)
        quoted = message or {"role": "assistant", "content": text}
        self._turns.append(_OwnTurn(generation, quoted, _stand_in(len(self._turns), text)))
        self.messages.append(quoted)
        self.segments.append(Segment(generation.token_ids, generation))

    def reply(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> None:
        """What the environment says after a turn of the model; the model continues next."""
        self.messages += messages
        text = self._rendered_tail(self._handle.render_chat(self._with_stand_ins(), tools))
        self._between.append(text)
        last = self._turns[-1].generation
        if last.token_ids and last.finish_reason is FinishReason.STOP:
            text = _after(text, last.stop_string or self._handle.decode_raw(last.token_ids[-1:]))
        self._say(text)

    def reply_text(self, text: str) -> None:
        """What the environment says, as plain text without a chat template."""
        self._say(text)

    def drop_reply(self) -> None:
        """Forget what was said after the model's last turn, as no turn follows."""
        while self.segments and self.segments[-1].generation is None and self._turns:
            self.segments.pop()

    def tail_of(self, messages: Sequence[Message]) -> list[Message]:
        """The new messages; raises an error if the earlier ones are not those of this conversation."""
        earlier = messages[: len(self.messages)]
        if len(earlier) < len(self.messages) or not all(map(_same, earlier, self.messages)):
            raise EnvironmentFailure(
                "the environment rewrites earlier turns of its conversation, for example to shorten or branch it. "
                "Training needs the tokens that the model saw, so a conversation may only grow at its end: leave "
                "earlier messages as they were, and add new ones after them"
            )
        return list(messages[len(self.messages) :])

    def _say(self, text: str) -> None:
        self.segments.append(Segment(self._handle.encode(text)))

    def _with_stand_ins(self) -> list[Message]:
        stand_ins = iter(self._turns)
        upcoming = next(stand_ins, None)
        chat: list[Message] = []
        for message in self.messages:
            if upcoming is not None and message is upcoming.message:
                chat.append({"role": "assistant", "content": upcoming.stand_in})
                upcoming = next(stand_ins, None)
            else:
                chat.append(message)
        return chat

    def _rendered_tail(self, rendered: str) -> str:
        """What follows the model's last turn; raises an error if the text before it has changed.

        White space that a template puts before the model's words does not count: the model saw none, and may or may not
        have written some.
        """
        rest = rendered
        for between, turn in zip(self._between, self._turns, strict=True):
            if not rest.startswith(between):
                raise EnvironmentFailure(_rewritten(between, rest[: len(between)]))
            rest = rest[len(between) :]
            if not rest.lstrip().startswith(turn.stand_in):
                raise EnvironmentFailure(_not_as_written(rest, turn.stand_in))
            rest = rest.lstrip()[len(turn.stand_in) :]
        return rest


def _after(text: str, end: str) -> str:
    """`text` without the end of turn that the model wrote itself, and white space before that; else unchanged."""
    stripped = text.lstrip()
    return stripped[len(end) :] if end.strip() and stripped.startswith(end) else text.removeprefix(end)


def _not_as_written(rest: str, stand_in: str) -> str:
    before, found, _ = rest.partition(stand_in)
    if found:
        return (
            f"the tokenizer's chat template puts {_shown(before)} in front of an earlier turn of the model, but the "
            "model did not see that text when it wrote the turn. Use a chat template whose generation prompt "
            "(add_generation_prompt) already ends with that text, or one that does not add it"
        )
    return _rewritten(stand_in, rest[: len(stand_in)])


def _rewritten(expected: str, got: str) -> str:
    return (
        "the tokenizer's chat template renders earlier turns differently once another turn follows (some templates "
        "drop the reasoning, for example), so training would see other tokens than the model did. Use a chat template "
        f"that renders earlier turns unchanged. Expected {_shown(expected)}, got {_shown(got)}"
    )


def _stand_in(number: int, text: str) -> str:
    """Text in the shape of what the model wrote, so that a template treats it alike, with nothing it would trim."""
    turn = f"[[turn {number}]]"
    if "</think>" not in text:
        return turn
    opening = "<think>\n" if "<think>" in text else ""
    return f"{opening}[[thought {number}]]\n</think>\n\n{turn}"


def _same(quoted: Message, own: Message) -> bool:
    return quoted.get("role") == own.get("role") and (quoted.get("content") or "") == (own.get("content") or "")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else f"…{text[-119:]}")

"""The generation handle of one sample: tokenizer, engine, sampling, seed and time limit in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.errors import ConfigError, EnvironmentFailure, GenerationTimeout, OverlongPrompt, PromptTooLong
from penstock.rollout.engines.base import GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.engines.stop_strings import cut_after
from penstock.rollout.prompt_room import PromptRoom
from penstock.rollout.prompts import Message, derive_seed
from penstock.rollout.token_texts import HFTokenTexts
from penstock.runtime.time_limit import TimeLimit
from penstock.text import error_text, safe, safe_value

_ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
"""Special tokens that structure sequences; tokenizers may have others, which are a model's words."""
_PROMPTS_KEPT = 64
"""How many of the latest prompts have their ids cached."""


class Generator(Protocol):
    """Where responses come from: a fleet of engines, or a single one."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one response."""


class Tokenizer(Protocol):
    """What Penstock needs of a tokenizer."""

    @property
    def uses_chat(self) -> bool:
        """Whether prompts and later turns are rendered with a chat template."""

    def encode_prompt(self, content: str | Sequence[Message]) -> tuple[int, ...]:
        """A prompt as token ids."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as token ids."""

    def decode(self, token_ids: Sequence[int], ends: AbstractSet[int] | None = None) -> str:
        """Token ids as text, without special tokens; given `ends`, only without those that begin or pad text or are
        among them."""

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """A chat as the text that the model continues; only if `uses_chat`."""


class HFTokenizer:
    """A Hugging Face tokenizer, with or without its chat template.

    What environments say passes through here: characters that no tokenizer takes are replaced (`penstock.text`).
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: bool = False, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._template_kwargs = dict(template_kwargs or {})
        added = tokenizer.added_tokens_decoder.items()
        self._special = frozenset(tokenizer.all_special_ids).union(token for token, word in added if word.special)
        roles = (getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES)
        self._wordless = frozenset(token for token in roles if token is not None)
        self.texts = HFTokenTexts(tokenizer, self._wordless)
        """How the tokens of a response read, for the engine."""
        self._prompts: dict[str, tuple[int, ...]] = {}
        """The last prompts' ids: all samples of a group ask for the same one."""

    @property
    def uses_chat(self) -> bool:
        return self._chat_template

    def encode_prompt(self, content: str | Sequence[Message]) -> tuple[int, ...]:
        content = safe_value(content)
        try:
            key = json.dumps(content)
        except (TypeError, ValueError):  # a chat with values that JSON cannot express: encoded every time
            return self._encode_prompt(content)
        found = self._prompts.get(key)
        if found is None:
            found = self._prompts[key] = self._encode_prompt(content)
            if len(self._prompts) > _PROMPTS_KEPT:
                del self._prompts[next(iter(self._prompts))]
        return found

    def _encode_prompt(self, content: str | Sequence[Message]) -> tuple[int, ...]:
        if self._chat_template:
            messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
            return self.encode(self.render_chat(messages))
        if not isinstance(content, str):
            raise ConfigError(["data.chat_template: must be true, because a prompt is a chat and not text"])
        return self._opening(content) + self.encode(content)

    def _opening(self, text: str) -> tuple[int, ...]:
        """The beginning-of-sequence token, if the tokenizer puts one before text; chat templates bring their own."""
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return ()
        return (bos,) if self._tokenizer(text)["input_ids"][:1] == [bos] else ()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(safe(text), add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], ends: AbstractSet[int] | None = None) -> str:
        dropped = self._special if ends is None else self._wordless | (ends & self._special)
        return self.decode_raw([token for token in token_ids if token not in dropped])

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def wordless_tokens(self, words: Sequence[str]) -> frozenset[int]:
        """Those of `words` that are special tokens which no text shows, such as the padding token, by their ids."""
        spelled = {self.decode_raw((token,)): token for token in self._wordless}
        return frozenset(spelled[word] for word in words if word in spelled)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        if not self._chat_template:
            raise ConfigError(["data.chat_template: must be true for an environment that uses chat messages"])
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(safe_value(message)) for message in messages],
                    tools=[dict(safe_value(tool)) for tool in tools] or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **self._template_kwargs,
                )
            )
        except Exception as error:  # templates are programs: they refuse roles with their own errors
            raise EnvironmentFailure(
                f"the tokenizer's chat template cannot render this chat: {type(error).__name__}: {error_text(error)}"
            ) from error


@dataclass
class SampleHandle:
    """Implements `GenerationHandle` for sample `sample` of a group; turns are numbered so that seeds differ."""

    engine: Generator
    tokenizer: Tokenizer
    sampling: SamplingParams
    group_id: str
    sample: str
    seed: int
    timeout_seconds: float
    room: PromptRoom | None = None
    """What becomes of a prompt that is too long; None leaves that to the engine."""
    turn: int = 0
    _stopped: dict[tuple[int, ...], str] = field(default_factory=dict, init=False)
    """Responses that a stop string ended, and which."""
    prompt_cut: bool = False
    """Whether the prompt was too long, and only its last tokens were kept."""

    @property
    def uses_chat(self) -> bool:
        return self.tokenizer.uses_chat

    def encode_prompt(self, content: str | Sequence[Message]) -> tuple[int, ...]:
        return self.fit_prompt(self.tokenizer.encode_prompt(content))

    def fit_prompt(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        whole = tuple(token_ids)
        fitting = whole if self.room is None else self.room.fit(whole, self.sampling.max_new_tokens)
        self.prompt_cut = self.prompt_cut or len(fitting) < len(whole)
        return fitting

    def encode(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(token_ids, self.sampling.stop_token_ids)
        stop = self._stopped.get(tuple(token_ids)) if self._stopped else None
        return text if stop is None else cut_after(text, stop)

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode_raw(token_ids)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        return self.tokenizer.render_chat(messages, tools)

    async def generate(
        self,
        context_ids: Sequence[int],
        *,
        stop_token_ids: AbstractSet[int] = frozenset(),
        stop: Sequence[str] = (),
        max_new_tokens: int | None = None,
    ) -> GenerationResult:
        request = GenerationRequest(
            request_id=f"{self.sample}_t{self.turn}",
            prompt_ids=tuple(context_ids),
            sampling=self._sampling(stop_token_ids, stop, max_new_tokens),
            seed=derive_seed(self.seed, self.turn),
            group_id=self.group_id,
        )
        self.turn += 1
        limit = TimeLimit(self.timeout_seconds)
        try:
            async with limit:
                result = await self.engine.generate(request)
        except PromptTooLong as error:
            if self.turn > 1:
                raise
            raise OverlongPrompt(str(error)) from error
        except TimeoutError as error:
            if not limit.expired:
                raise
            raise GenerationTimeout(
                f"request {request.request_id} took longer than {self.timeout_seconds} s "
                "(rollout.generation_timeout_seconds)"
            ) from error
        if result.stop_string is not None:
            self._stopped[result.token_ids] = result.stop_string
        return result

    def _sampling(
        self, stop_token_ids: AbstractSet[int], stop: Sequence[str], max_new_tokens: int | None
    ) -> SamplingParams:
        if isinstance(stop, str):
            raise TypeError(f'stop is the text {stop!r}, not a tuple of texts: write ("{stop}",)')
        if not stop_token_ids and not stop and max_new_tokens is None:
            return self.sampling
        longest = self.sampling.max_new_tokens
        return replace(
            self.sampling,
            max_new_tokens=longest if max_new_tokens is None else min(max_new_tokens, longest),
            stop_token_ids=self.sampling.stop_token_ids | stop_token_ids,
            stop=tuple(dict.fromkeys((*self.sampling.stop, *stop))),
        )

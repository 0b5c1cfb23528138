"""The generation handle of one sample: tokenizer, engine, sampling, seed and time limit in one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import GenerationTimeout
from penstock.rollout.engines.base import GenerationEngine, GenerationRequest, GenerationResult, SamplingParams
from penstock.rollout.prompts import derive_seed


class Tokenizer(Protocol):
    """What Penstock needs of a tokenizer."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """A prompt as token ids."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text as token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text."""


class HFTokenizer:
    """A Hugging Face tokenizer, with or without its chat template."""

    def __init__(self, tokenizer: Any, *, chat_template: bool) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        if not self._chat_template:
            return self.encode(text)
        messages = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.encode(rendered)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


@dataclass
class SampleHandle:
    """Implements `GenerationHandle` for sample `sample` of a group; turns are numbered, so that seeds differ."""

    engine: GenerationEngine
    tokenizer: Tokenizer
    sampling: SamplingParams
    group_id: str
    sample: str
    seed: int
    timeout_seconds: float
    turn: int = 0

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode_prompt(text)

    def encode(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    async def generate(self, context_ids: Sequence[int]) -> GenerationResult:
        request = GenerationRequest(
            request_id=f"{self.sample}_t{self.turn}",
            prompt_ids=tuple(context_ids),
            sampling=self.sampling,
            seed=derive_seed(self.seed, self.turn),
            group_id=self.group_id,
        )
        self.turn += 1
        limit = asyncio.timeout(self.timeout_seconds)
        try:
            async with limit:
                return await self.engine.generate(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise GenerationTimeout(
                f"request {request.request_id} took longer than {self.timeout_seconds} s "
                "(rollout.generation_timeout_seconds)"
            ) from error

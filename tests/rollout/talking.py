"""A model that says what a script tells it, in text, and a handle onto it."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import AddedToken

from penstock.errors import PromptTooLong
from penstock.rollout.engines.base import FinishReason, GenerationRequest, SamplingParams
from penstock.rollout.engines.scripted import ScriptedEngine, ScriptedResponse
from penstock.rollout.handle import HFTokenizer, SampleHandle
from tests.support.tiny_models import char_tokenizer

EOS = 1
CHAT = (
    "{% if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPACED = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %}{{ ' ' + message.content + ' <eos>' }}{% endif %}{% endfor %}"
)
"""In the manner of Llama 2: spaces around the model's words, and nothing that asks for them."""
ADDS_THOUGHTS = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}<think></think>{% endif %}"
    "{{ message.content }}<eos>\n{% endfor %}assistant: "
)
DROPS_THOUGHTS = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ message.content }}{% endif %}<eos>\n{% endfor %}assistant: "
)

Says = Callable[[str], str]
"""From the text so far to the model's next words; a trailing `…` means that it is cut off."""


def tokenizer(template: str | None = None) -> HFTokenizer:
    hf = char_tokenizer()
    hf.chat_template = template
    return HFTokenizer(hf, chat_template=template is not None)


def tagging_tokenizer(*tags: str, template: str | None = None, opens: bool = False) -> HFTokenizer:
    """A tokenizer that has tags as special tokens; `opens`: one that puts a special token before text."""
    hf = char_tokenizer()
    hf.add_tokens([AddedToken(tag, special=True) for tag in tags])
    if opens:
        from tokenizers.processors import TemplateProcessing

        hf.add_special_tokens({"bos_token": "<bos>"})
        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", hf.bos_token_id)]
        )
    hf.chat_template = template
    return HFTokenizer(hf, chat_template=template is not None)


def merging_tokenizer(template: str | None = None) -> HFTokenizer:
    """A tokenizer that does not give back the ids it decoded: `a`, `b` is read as one token where it was two."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<pad>", "<eos>", "<unk>", *string.ascii_lowercase, *" :<>/[]\n", "ab", "ba", "aba", "ss", "er"]
    merges = [("a", "b"), ("b", "a"), ("ab", "a"), ("s", "s"), ("e", "r")]
    bpe = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    bpe.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    hf.chat_template = template
    return HFTokenizer(hf, chat_template=template is not None)


@dataclass
class Talker:
    """The scripted model; remembers every request."""

    says: Says
    tokens: HFTokenizer = field(default_factory=tokenizer)
    max_model_len: int = 1000
    requests: list[GenerationRequest] = field(default_factory=list)
    engine: ScriptedEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = ScriptedEngine(self._answer, version=3)

    def _answer(self, request: GenerationRequest) -> ScriptedResponse:
        self.requests.append(request)
        if len(request.prompt_ids) >= self.max_model_len:
            raise PromptTooLong(f"{len(request.prompt_ids)} tokens in a context of {self.max_model_len}")
        said = self.says(self.tokens.decode_raw(request.prompt_ids))
        if said.endswith("…"):
            return ScriptedResponse(0.0, self.tokens.encode(said[:-1]), FinishReason.LENGTH)
        return ScriptedResponse(0.0, (*self.tokens.encode(said), EOS))

    def handle(self, sample: str = "grp_g0", max_new_tokens: int = 50) -> SampleHandle:
        sampling = SamplingParams(max_new_tokens, stop_token_ids=frozenset({EOS}))
        return SampleHandle(self.engine, self.tokens, sampling, "grp", sample, seed=0, timeout_seconds=5)

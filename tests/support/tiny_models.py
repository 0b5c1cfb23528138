"""Tiny models and tokenizers made on the spot; no download, a few milliseconds each."""

from __future__ import annotations

import copy
import string
from pathlib import Path
from typing import Any

import torch

ALPHABET = string.digits + string.ascii_lowercase + string.ascii_uppercase + string.punctuation + " \n"


def char_tokenizer(alphabet: str = ALPHABET) -> Any:
    """A tokenizer with one token per character; pad is 0, end of sequence is 1, unknown is 2."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(alphabet)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


FAMILIES = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "llama": ("Llama", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 8}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "granite": ("Granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
}
"""Class prefix in transformers, and what makes the family what it is apart from the sizes. Head dimensions are those of
32 hidden numbers in 4 heads; Gemma alternates windowed and full layers, Phi's head has a bias."""


def tiny_model(
    family: str = "qwen3",
    *,
    vocabulary: int = 101,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
    tied: bool = True,
    **settings: Any,
) -> Any:
    """A randomly initialised model in fp32, evaluation mode, of one of the `FAMILIES`; `settings` go to its config."""
    import transformers as hf

    prefix, own = FAMILIES[family]
    if "head_dim" in own:
        own = own | {"head_dim": hidden // 4}
    if family == "qwen3_moe":
        own = own | {"moe_intermediate_size": hidden}
    if family in ("gemma2", "gemma3"):
        own = own | {"layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]}
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied and family != "phi",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    config = getattr(hf, f"{prefix}TextConfig" if family == "gemma3" else f"{prefix}Config")
    model = getattr(hf, f"{prefix}ForCausalLM")(config(**common | own | settings))
    if family == "gemma2":
        model.set_attn_implementation("eager")  # the only one on a CPU that caps attention scores
    # The default initialisation is so narrow that all tokens are equally likely; wider weights make tests sharper.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def bpe_tokenizer(vocabulary: int = 300, *, pad: bool = True, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level BPE tokenizer, trained on the spot, as those of today's models are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is the sum of one and two and three", "the answer is seven"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>" if pad else None,
        eos_token="<eos>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def save_tiny_model(folder: Path, *, tokenizer: Any = None, **model_args: Any) -> Path:
    """A model folder as users have them: weights, config and tokenizer (by default one token per character)."""
    tokenizer = tokenizer or char_tokenizer()
    model = tiny_model(vocabulary=len(tokenizer), **model_args)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_copy(model: Any) -> Any:
    """A plain model with its own weights that computes the same as `model`, adapted or not, as an engine has it."""
    from penstock.weights.lora import LoraAdapter

    adapter = LoraAdapter.of(model)
    if adapter is None:
        return copy.deepcopy(model)
    plain = copy.deepcopy(adapter.peft_model).unload()
    with torch.no_grad():
        for name, tensor in adapter.merged_weights():
            plain.get_parameter(name).copy_(tensor)
    return plain

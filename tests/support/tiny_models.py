"""Tiny models and tokenizers made on the spot; no download, a few milliseconds each."""

from __future__ import annotations

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


def tiny_model(
    family: str = "qwen3", *, vocabulary: int = 101, hidden: int = 32, layers: int = 2, seed: int = 0, tied: bool = True
) -> Any:
    """A randomly initialised model in fp32, evaluation mode. Families: qwen3, llama, qwen3_moe."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    if family == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(head_dim=hidden // 4, **common))
    elif family == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**common))
    elif family == "qwen3_moe":
        extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "head_dim": hidden // 4}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**extra, **common))
    else:
        raise ValueError(f"no tiny model for {family}")
    # The default initialisation is so narrow that all tokens are equally likely; wider weights make tests sharper.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    return model.eval()


def save_tiny_model(folder: Path, **model_args: Any) -> Path:
    """A model folder as users have them: weights, config and tokenizer."""
    tokenizer = char_tokenizer()
    model = tiny_model(vocabulary=len(tokenizer), **model_args)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

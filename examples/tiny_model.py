"""A model to try things with: a Qwen3 of 30 thousand parameters, random weights, one token per letter."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def save_tiny_model(folder: str | Path, seed: int = 0) -> str:
    """Write model and tokenizer as Hugging Face folders have them; gives the folder."""
    tokens = ["<pad>", "<eos>", "<unk>", *string.ascii_lowercase, ":"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": True}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokens), **sizes, **heads, **ids)).save_pretrained(folder)
    return str(folder)

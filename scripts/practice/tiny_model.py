"""A tiny random model and chats to train it on, made without any download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_llama(folder: Path, *, seed: int = 0, hidden: int = 64, intermediate: int = 128, layers: int = 2) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template, made without any download."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|pad|>", "<|start|>", "<|end|>"]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>", model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of very different length, so that shares by rows and by tokens differ."""
    import random

    draw = random.Random(seed)
    words = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "rain", "tree", "stone", "river", "cloud"]

    def say(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    rows = []
    for _ in range(count):
        turns = draw.randint(1, 2)
        messages = []
        for _ in range(turns):
            messages += [{"role": "user", "content": say(4)}, {"role": "assistant", "content": say(12)}]
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path

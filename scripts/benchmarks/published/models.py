"""config.json of the models that published figures name in their own short words. From the models' pages on the hub.

Qwen's first models are described as the llama that has the same layers: their `intermediate_size` counts gate and up together.
"""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate, "vocab_size": vocabulary, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _qwen2(*shape: int, tied: bool) -> dict[str, Any]:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = shape
    return _llama(hidden, layers, heads, kv_heads, intermediate, vocabulary, model_type="qwen2", tie_word_embeddings=tied)


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen1-1.8b": _llama(2048, 24, 16, 16, 5504, 151_936),
    "qwen1-7b": _llama(4096, 32, 32, 32, 11_008, 151_936),
    "qwen1-14b": _llama(5120, 40, 40, 40, 13_696, 152_064),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11_008, 151_936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18_944, 152_064, tied=False),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13_824, 152_064, tied=False),
    "mistral-7b-v3": _llama(4096, 32, 32, 8, 14_336, 32_768, model_type="mistral"),
    "deepseek-coder-1.3b": _llama(2048, 24, 16, 16, 5504, 32_256),
    "gemma-2b": _llama(2048, 18, 8, 1, 16_384, 256_000, model_type="gemma", tie_word_embeddings=True, head_dim=256),
    "gemma-7b": _llama(3072, 28, 16, 16, 24_576, 256_000, model_type="gemma", tie_word_embeddings=True, head_dim=256),
}

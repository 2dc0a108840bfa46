"""How many weights a model has beside its language model: its part for images, and what joins both. Pure.

Sources: transformers (models/siglip, gemma3, gemma4: the modeling and configuration files); the tests compare the counts with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.controller.planning.model.layers import count_of

# What a vision_config leaves out.
_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 16, "num_channels": 3}
_GEMMA4 = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64,
    "patch_size": 16, "position_embedding_size": 10_240,
}  # fmt: skip
SEEING = frozenset(("gemma3", "gemma4"))


def weights_of(config: Mapping[str, Any], hidden: int) -> int | None:
    """Of the config.json of one of SEEING, whose language model has `hidden` features; None where it does not say them, and for a model that hears, too."""
    if config.get("audio_config") is not None:
        return None
    vision = config.get("vision_config")
    if config["model_type"] == "gemma4":
        return 0 if vision is None else _gemma4(vision, hidden) if isinstance(vision, Mapping) else None
    return _gemma3(vision, hidden) if isinstance(vision, Mapping) else None


def _gemma3(vision: Mapping[str, Any], hidden: int) -> int | None:
    width, wide, depth, image, patch, channels = sizes = [count_of(vision.get(key, default)) for key, default in _SIGLIP.items()]
    if not all(sizes):
        return None
    layer = 4 * width * (width + 1) + 2 * width * wide + wide + width
    ends = channels * patch * patch * width + width + (image // patch) ** 2 * width + 2 * width
    head = width + layer + 2 * width if vision.get("vision_use_head", True) else 0
    return depth * (layer + 4 * width) + ends + head + width * hidden + width


def _gemma4(vision: Mapping[str, Any], hidden: int) -> int | None:
    width, wide, depth, heads, kv_heads, head_dim, patch, places = sizes = [
        count_of(vision.get(key, default)) for key, default in _GEMMA4.items()
    ]
    if not all(sizes) or vision.get("attention_bias"):
        return None
    layer = 2 * width * head_dim * (heads + kv_heads) + 2 * head_dim + 3 * width * wide + 4 * width
    return depth * layer + 2 * places * width + 3 * patch * patch * width + width * hidden

"""Whether the rows of a pass may stand one after the other without padding, as far as a model's config tells. The plan asks it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def unusual(config: Mapping[str, Any]) -> str | None:
    """Why not, by the config of the language model (config.json, or `text_config` in it); None where nothing in it speaks against it.

    A short trial would not show these: they reach over more tokens than it has.
    """
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        return f"it has layers with {', '.join(other)}"
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if config.get(name) is not None and config.get("use_" + name, True):
            return f"its config has {name}"
    return None

"""Whether a model's config allows the rows of a pass to stand one after the other without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def unusual(config: Mapping[str, Any]) -> str | None:
    """The reason against it in the config of the language model (config.json, or `text_config` in it); None where there is none.

    A short trial of the model would not show these reasons: they concern more tokens than a trial has.
    """
    other_layers = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other_layers:
        return f"it has layers with {', '.join(other_layers)}"
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if config.get(name) is not None and config.get("use_" + name, True):
            return f"its config has {name}"
    return None

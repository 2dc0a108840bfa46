"""Which numbers of a model's config.json are rates of chance: dropout, layer drop, noise of a router."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DRAWS = 2
"""How the random numbers of a pass are drawn: 1 one after the other, 2 anew for each layer. Another way is another number, and a run goes on as it began."""
DRAWS_KEY = "draws"  # of a run.json; where it is missing, 1

# attention_dropout, resid_pdrop, layerdrop, drop_path_rate, router_jitter_noise, moe_jitter_eps.
_CHANCE = re.compile(r"drop|jitter|noise")
# Of parts that no causal language model computes: heads that classify, GPT-2's summary.
_NEVER_READ = re.compile(r"^(classifier|summary|cls|pooler|seq_classif|qa|token_classif)")


def is_rate(name: str, value: Any) -> bool:
    """Whether a number of this name is a rate above 0."""
    return bool(_CHANCE.search(name)) and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def is_read(name: str) -> bool:
    """Whether a language model reads this key of its configuration."""
    return _NEVER_READ.match(name) is None


def rates(config: Mapping[str, Any]) -> dict[str, float]:
    """The rates of a config.json, of its language model alone. What a class takes where its config.json says nothing is not in it."""
    text = config.get("text_config")
    found: dict[str, float] = {}
    for part in (config, text if isinstance(text, Mapping) else {}):
        found.update({name: float(value) for name, value in part.items() if is_rate(name, value) and is_read(name)})
    return found

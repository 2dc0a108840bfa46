"""Which attention a card computes with, as far as its memory depends on it. What the worker does: `homelab.worker.grouped_queries`."""

from __future__ import annotations

from homelab import hardware


def repeats_keys(device: str, precision: str, card: str) -> bool:
    """Whether keys and values are repeated for grouped queries though no mask asks for it: only the flash kernel takes them as they
    are, and it wants 16 bits and an Ampere (8.0) or later. A card that nobody has heard of is newer than the table."""
    if device != "cuda":
        return False
    known = hardware.lookup(card)
    return precision == "fp32" or (known is not None and known.compute_capability < (8, 0))

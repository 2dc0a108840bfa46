"""Which weights of a built model are trained, and what its adapters start from: the same on every rank, for any number of ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

from homelab.worker.model import inspection


def freeze_unreached(model: Any, note: Callable[[str], None]) -> None:
    """Freeze what a training on text gives no gradient: towers for images and sounds, heads that are not computed. Ranks that wait for such a gradient
    cannot train together, and an optimizer would let it decay on some strategies only."""
    unreached = set(inspection.without_gradient(model))
    for name, parameter in model.named_parameters():
        if name in unreached:
            parameter.requires_grad_(False)
    places = dict.fromkeys(inspection.outside_language(model)) if unreached else {}
    outside = [place for place in places if any(f".{place}." in f".{name}" for name in unreached)]
    rest = [name for name in sorted(unreached) if not any(f".{place}." in f".{name}" for place in outside)]
    if frozen := [*outside, *dict.fromkeys(inspection.pattern(name) for name in rest)]:
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        note(f"frozen: {', '.join(frozen[:3])}{more}: a training on text gives them no gradient")


@torch.no_grad()
def start_adapters(model: Any, seed: int) -> None:
    """What each adapter starts from depends on the seed and its own name, as PEFT draws it (tuners/lora/layer.py, reset_lora_parameters): a stage
    that holds some of the layers starts from the same numbers as the whole model.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not (".lora_A." in name or ".lora_embedding_B." in name):
            continue  # the others start at zero, or from the base
        digest = hashlib.sha256(f"homelab adapter {seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.empty(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        else:  # the adapters of an embedding: A is zero, and B is drawn
            torch.nn.init.normal_(drawn, generator=generator)
        parameter.copy_(drawn)

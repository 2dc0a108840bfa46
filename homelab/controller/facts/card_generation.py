"""Of which generation a card is: CUDA's compute capability, and what follows from it. Pure.

What the driver and torch say of a card goes before the table of names (`homelab.controller.base.hardware`): a name may be older than the table, or newer.
"""

from __future__ import annotations

import re
from typing import Any

from homelab.controller.base import hardware
from homelab.controller.facts.gpu import NvidiaFacts
from homelab.shared.protocol.card_messages import GpuFacts

Capability = tuple[int, int]
AMPERE: Capability = (8, 0)
"""The first generation that computes in bfloat16, and that the flash kernel of attention takes."""


def of_card(card: GpuFacts, gpu: NvidiaFacts | None = None) -> Capability | None:
    """(8, 6) as the driver says of this card, else as torch does, else by its name; None where nobody knows. `gpu`: all that its node said of cards."""
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", card.compute_capability or "")
    if found:
        return int(found[1]), int(found[2])
    device = _as_torch_sees(card, gpu) if gpu is not None else {}
    numbers = [int(number) for number in device.get("capability") or ()]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    return hardware.generation(card.name)


def has_bf16(capability: Capability | None) -> bool | None:
    """Whether such a card computes in bfloat16; older ones emulate it, slowly. None where the generation is not known."""
    return None if capability is None else capability >= AMPERE


def _as_torch_sees(card: GpuFacts, gpu: NvidiaFacts) -> dict[str, Any]:
    """torch's view of this card: by uuid, and where it tells none by its place, if it saw as many as there are. Empty where there is none."""
    devices: list[dict[str, Any]] = (gpu.torch or {}).get("devices") or []
    if card.uuid is not None and any(device.get("uuid") == card.uuid for device in devices):
        return next(device for device in devices if device.get("uuid") == card.uuid)
    if len(devices) == len(gpu.cards) and card in gpu.cards and not any(device.get("uuid") for device in devices):
        return devices[gpu.cards.index(card)]
    return {}

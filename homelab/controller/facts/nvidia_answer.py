"""What nvidia-smi's own words mean, beside or in place of its answer, and whether a card has memory of its own. Pure."""

from __future__ import annotations

import re

from homelab.controller.base import hardware
from homelab.controller.facts import card_generation
from homelab.controller.facts.node import Facts
from homelab.shared.protocol.card_messages import GpuFacts

# The words are those of nvidia-smi and NVML (nvmlErrorString), drivers 470 to 590; the first that match count.
_KINDS = (
    ("lost", r"unable to determine the device handle|gpu is lost|fallen off the bus|gpu requires reset|no longer accessible"),
    ("mismatch", r"version mismatch"),
    ("blocked", r"blocked by the operating system"),
    ("no-driver", r"couldn't communicate|driver not loaded"),
    ("no-devices", r"no devices were found"),
    ("permissions", r"insufficient permissions|permission denied"),
    ("inforom", r"inforom is corrupted"),
    ("unheard", r"failed to initialize nvml"),
    ("cut-off", r"in the middle of its answer"),
)
_FELL_OFF = 79  # an Xid: the card fell off the bus


def kind_of(words: str) -> str:
    """One of `_KINDS`; "" for words that mean nothing to us."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, words, re.IGNORECASE)), "")


def complaints(facts: Facts) -> tuple[tuple[str, str], ...]:
    """(kind, line) of what nvidia-smi said beside its answer, each kind and card once."""
    said = dict.fromkeys(line.strip() for line in facts.gpu.said)
    return tuple((kind, line) for line in said if (kind := kind_of(line)))


def is_a_card_lost(facts: Facts) -> bool:
    """Whether a card that was there does not answer any more: what is missing then is no reason to forget it."""
    is_said = any(kind == "lost" for kind, _ in complaints(facts)) or kind_of(facts.gpu.nvidia_smi) == "lost"
    here = {slot(card.bus_id) for card in (*facts.gpu.cards, *facts.gpu.left_out) if card.bus_id}
    return is_said or any(entry.code == _FELL_OFF and slot(entry.bus_id) not in here for entry in facts.xid or ())


def shares_memory(card: GpuFacts, facts: Facts) -> bool:
    """Whether the card computes in the machine's own memory (GB10, Jetson): it has none to tell of, and that is right.

    By the answer (no memory, one address space with the processor) or by the compute platform, never by a name alone.
    """
    if card.memory_total_bytes is not None:
        return False
    if card.shares_memory is not None:
        return card.shares_memory
    return card_generation.of_card(card, facts.gpu) in hardware.INTEGRATED


def slot(bus_id: str) -> str:
    """`:01:00` of "00000000:01:00.0" and of "0000:01:00": the driver's log writes the PCI domain with fewer digits."""
    return bus_id.partition(".")[0].lower().lstrip("0")

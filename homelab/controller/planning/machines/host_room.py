"""What the host of a rank has room for beside its device: layers that come to it one after the other. Pure.

Beside a card that is the machine's memory, pinned so that copies run while the card computes. Where that is too small, memory that is not pinned takes
them (under WSL2 alone, where little can be pinned), or else the disk of the workdir. Beside a processor, whose memory is the one that lacks room, it is
that disk. A card's rate is that of its PCIe link. It is assumed where the link is not known, for memory that is not pinned, and for a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines.machines import RankSlot, host_memory
from homelab.controller.planning.memory_estimate import StreamingPlan
from homelab.controller.planning.pcie_link import PcieLink
from homelab.shared.law.streaming import DISK, MEMORY, PAGEABLE, PLACES_AT_ONCE

# To a card whose link is not known: as by PCIe 3.0 with 16 lanes.
PCIE_BYTES_PER_S = 12e9
# An H200's host gave 5.8 and 8.2 GB/s (`scripts/bench gpu --only streaming`): a processor copies twice. A slow link is the limit instead.
PAGEABLE_BYTES_PER_S = 5e9
DISK_BYTES_PER_S = 1.5e9  # an NVMe drive that reads for hours
TURNING_DISK_BYTES_PER_S = 0.12e9
# Of free memory: the rest is for the process, the data, and what the machine does beside it. Under WSL2 a kernel of Windows limits what can be pinned.
_MEMORY_PART, _PINNED_PART_OF_WSL = 0.8, 0.4
_DISK_PART = 0.5


@dataclass(frozen=True)
class HostRoom:
    """`bytes_free` None: nobody asked the node. `pinned_free`: beside a disk or memory that is not pinned, what the inputs of layers have room in.
    `link` None: the rate is assumed."""

    kind: Literal["memory", "pageable", "disk"]
    bytes_free: int | None
    bytes_per_s: float
    link: PcieLink | None = None
    pinned_free: int | None = None

    def plan(self, layers: int, layer_bytes: int, group: int) -> StreamingPlan:
        """So many layers in this room, for `group` micro-batches at a time."""
        return StreamingPlan(
            layers=layers, group=group, host=self.kind, places=PLACES_AT_ONCE, layer_bytes=layer_bytes, bytes_per_s=self.bytes_per_s, link=self.link
        )  # fmt: skip

    def takes(self, layers: int, layer_bytes: int, inputs: int = 0, input_bytes: int = 0) -> bool:
        """Whether so many layers, and inputs of layers that wait for their backward pass in pinned memory, have room; yes where that is not known."""
        inputs_bytes = inputs * _pinned(input_bytes)
        layers_bytes = layers * (_pinned(layer_bytes) if self.kind == MEMORY else layer_bytes)
        needed_bytes = layers_bytes if self.kind == DISK else layers_bytes + inputs_bytes
        return _fits(needed_bytes, self.bytes_free) and (self.kind == MEMORY or _fits(inputs_bytes, self.pinned_free))


def _pinned(size_bytes: int) -> int:
    """torch rounds a block of pinned memory up to a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


def _fits(needed_bytes: int, free_bytes: int | None) -> bool:
    return free_bytes is None or needed_bytes <= free_bytes


def rooms_of(slot: RankSlot, sharing: int) -> Sequence[HostRoom]:
    """The rooms for the rank in this place, of `sharing` ranks on its machine: the fastest one first, and the others as last resorts."""
    facts = slot.facts
    if facts is None:
        return [HostRoom(MEMORY, None, PCIE_BYTES_PER_S) if slot.device == "cuda" else HostRoom(DISK, None, DISK_BYTES_PER_S)]
    free = facts.resources.disk_free_bytes
    disk = HostRoom(
        DISK,
        None if free is None else int(_DISK_PART * free) // sharing,
        TURNING_DISK_BYTES_PER_S if facts.resources.disk_turns else DISK_BYTES_PER_S,
    )
    if slot.device != "cuda":
        return [disk]
    return _beside_a_card(slot, facts, sharing, disk)


def _beside_a_card(slot: RankSlot, facts: Facts, sharing: int, disk: HostRoom) -> Sequence[HostRoom]:
    total, held_bytes = host_memory(facts.system)
    left = None if total is None else max(0, total - held_bytes) / sharing
    link = _link_of(slot, facts)
    card_bytes_per_s = link.bytes_per_s if link is not None else PCIE_BYTES_PER_S
    if left is None:
        return [HostRoom(MEMORY, None, card_bytes_per_s, link)]
    memory_free, pinned_free = (int(part * left) for part in (_MEMORY_PART, _PINNED_PART_OF_WSL if facts.network.wsl else _MEMORY_PART))
    memory = HostRoom(MEMORY, pinned_free, card_bytes_per_s, link)
    pageable = HostRoom(PAGEABLE, memory_free, min(PAGEABLE_BYTES_PER_S, card_bytes_per_s), pinned_free=pinned_free)
    last = (
        []
        if disk.bytes_free is None
        else [HostRoom(DISK, disk.bytes_free, min(disk.bytes_per_s, card_bytes_per_s), pinned_free=pinned_free)]
    )
    return [memory, *([pageable] if facts.network.wsl else []), *last]


def _link_of(slot: RankSlot, facts: Facts) -> PcieLink | None:
    """The link of the card in this place. A card in the machine's own memory may name one lane, and copies without it: None."""
    card = facts.gpu.cards[slot.local_rank]
    if card.pcie_generation is None or card.pcie_width is None or nvidia_answer.shares_memory(card, facts):
        return None
    return PcieLink(generation=card.pcie_generation, lanes=card.pcie_width)

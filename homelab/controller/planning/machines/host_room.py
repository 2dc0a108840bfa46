"""What the host of a rank has room for beside its device: layers that come to it one after the other. Pure.

Beside a card that is the machine's memory, pinned so that copies run while the card computes. Beside a processor, whose memory is the one that lacks
room, it is the disk of its workdir. A card's rate is that of its PCIe link. It is assumed where the link is not known, and for a disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines.machines import RankSlot, host_memory
from homelab.controller.planning.pcie_link import PcieLink

# To a card whose link is not known: as by PCIe 3.0 with 16 lanes.
PCIE_BYTES_PER_S = 12e9
DISK_BYTES_PER_S = 1.5e9  # an NVMe drive that reads for hours
# Of free memory: the rest is for the process, the data, and what the machine does beside it. Under WSL2 a kernel of Windows limits what can be pinned.
_PINNED_PART, _WSL_PART = 0.8, 0.4
_DISK_PART = 0.5


@dataclass(frozen=True)
class HostRoom:
    """`bytes_free` None: nobody asked the node. `link` None: the rate is assumed."""

    kind: Literal["memory", "disk"]
    bytes_free: int | None
    bytes_per_s: float
    link: PcieLink | None = None

    def held_bytes(self, blocks: int, block_bytes: int) -> int:
        """What so many blocks take there. torch rounds a block of pinned memory up to a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""
        return blocks * (1 << (block_bytes - 1).bit_length() if self.kind == "memory" else block_bytes)

    def takes(self, size_bytes: float) -> bool:
        """Whether so much has room; yes where it is not known."""
        return self.bytes_free is None or size_bytes <= self.bytes_free


def of(slot: RankSlot, sharing: int) -> HostRoom:
    """The room for the rank in this place, of `sharing` ranks on its machine."""
    facts = slot.facts
    if slot.device == "cuda":
        if facts is None:
            return HostRoom("memory", None, PCIE_BYTES_PER_S)
        total, held_bytes = host_memory(facts.system)
        part = _WSL_PART if facts.network.wsl else _PINNED_PART
        free = None if total is None else int(part * max(0, total - held_bytes)) // sharing
        link = _link_of(slot, facts)
        return HostRoom("memory", free, link.bytes_per_s if link is not None else PCIE_BYTES_PER_S, link)
    disk = facts.resources.disk_free_bytes if facts is not None else None
    return HostRoom("disk", None if disk is None else int(_DISK_PART * disk) // sharing, DISK_BYTES_PER_S)


def _link_of(slot: RankSlot, facts: Facts) -> PcieLink | None:
    """The link of the card in this place. A card in the machine's own memory may name one lane, and copies without it: None."""
    card = facts.gpu.cards[slot.local_rank]
    if card.pcie_generation is None or card.pcie_width is None or nvidia_answer.shares_memory(card, facts):
        return None
    return PcieLink(generation=card.pcie_generation, lanes=card.pcie_width)

"""What the host of a rank has room for beside its device, and how fast it comes from there: by the card's own link, or as assumed."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.planning.machines import host_room
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.pcie_link import PcieLink
from tests import builders

GB = 10**9
CARD = {"name": "NVIDIA GeForce RTX 4090", "memory_total_bytes": 24 * 2**30, "memory_used_bytes": 0, "compute_capability": "8.9"}


def room_of(*cards: dict[str, Any], at: int = 0, device: str = "cuda", **system: Any) -> host_room.HostRoom:
    """Beside the card in this place, of a machine with these."""
    entries = [{"index": number, **CARD, **card} for number, card in enumerate(cards)]
    facts = builders.facts("tower", with_gpus=True, gpu={"nvidia_smi": "ok", "driver_version": "580.95.05", "cards": entries}, **system)
    (node,) = builders.cluster(["tower"]).nodes
    return host_room.of(RankSlot(at, node, at, device, facts), 1)


@pytest.mark.parametrize(
    ("generation", "lanes", "gb_per_s", "words"),
    [
        (1, 16, 3.2, "PCIe 1.0, 16 lanes"),
        (2, 16, 6.4, "PCIe 2.0, 16 lanes"),
        (3, 16, 12.6, "PCIe 3.0, 16 lanes"),  # 12 to 13 by common reports
        (4, 16, 25.2, "PCIe 4.0, 16 lanes"),
        (5, 16, 50.4, "PCIe 5.0, 16 lanes"),  # 53.7 and 55.2 on an H200
        (6, 16, 96.8, "PCIe 6.0, 16 lanes"),
        (4, 8, 12.6, "PCIe 4.0, 8 lanes"),  # a laptop
        (4, 4, 6.3, "PCIe 4.0, 4 lanes"),  # an external case
        (3, 1, 0.788, "PCIe 3.0, 1 lane"),  # a riser
    ],
)
def test_the_rate_is_that_of_the_cards_link(generation: int, lanes: int, gb_per_s: float, words: str) -> None:
    room = room_of({"pcie_generation": generation, "pcie_width": lanes, "pcie_width_max": 16})
    assert room.link is not None and room.link.text == words
    assert room.bytes_per_s == room.link.bytes_per_s == pytest.approx(gb_per_s * GB, rel=0.005)


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"pcie_generation": 4},
        {"pcie_width": 8},
        {"pcie_generation": 4, "pcie_width": 0},
        {"pcie_generation": 9, "pcie_width": 16},
        # in the machine's memory, with a link of one lane that no copy takes
        {"name": "NVIDIA GB10", "memory_total_bytes": None, "compute_capability": "12.1", "pcie_generation": 4, "pcie_width": 1},
        {"memory_total_bytes": None, "shares_memory": True, "pcie_generation": 4, "pcie_width": 1},
    ],
)
def test_without_a_link_the_rate_is_assumed(card: dict[str, Any]) -> None:
    room = room_of(card)
    assert (room.kind, room.bytes_per_s, room.link) == ("memory", 12e9, None)


def test_a_machine_that_nobody_asked_has_the_assumed_rate() -> None:
    (node,) = builders.cluster(["tower"], with_gpus=True).nodes
    room = host_room.of(RankSlot(0, node, 0, "cuda", None), 1)
    assert (room.kind, room.bytes_free, room.bytes_per_s, room.link) == ("memory", None, 12e9, None)


def test_each_card_of_a_machine_has_its_own_link() -> None:
    cards = {"pcie_generation": 4, "pcie_width": 16}, {"pcie_generation": 3, "pcie_width": 4}
    assert [room_of(*cards, at=place).link for place in (0, 1)] == [PcieLink(generation=4, lanes=16), PcieLink(generation=3, lanes=4)]


def test_the_disk_beside_a_processor_has_no_link() -> None:
    room = room_of({"pcie_generation": 4, "pcie_width": 16}, device="cpu")
    assert (room.kind, room.bytes_per_s, room.link) == ("disk", host_room.DISK_BYTES_PER_S, None)

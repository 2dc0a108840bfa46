"""What the host of a rank has room for beside its device, and how fast it comes from there: by the card's own link, or as assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from homelab.controller.planning.machines import host_room
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.pcie_link import PcieLink
from tests import builders

GB = 10**9
CARD = {"name": "NVIDIA GeForce RTX 4090", "memory_total_bytes": 24 * 2**30, "memory_used_bytes": 0, "compute_capability": "8.9"}


def rooms_of(*cards: dict[str, Any], at: int = 0, device: str = "cuda", sharing: int = 1, **facts_of: Any) -> Sequence[host_room.HostRoom]:
    """Beside the card in this place, of a machine with these."""
    entries = [{"index": number, **CARD, **card} for number, card in enumerate(cards)]
    facts = builders.facts("tower", with_gpus=True, gpu={"nvidia_smi": "ok", "driver_version": "580.95.05", "cards": entries}, **facts_of)
    (node,) = builders.cluster(["tower"]).nodes
    return host_room.rooms_of(RankSlot(at, node, at, device, facts), sharing)


def room_of(*cards: dict[str, Any], **given: Any) -> host_room.HostRoom:
    """The first one."""
    return rooms_of(*cards, **given)[0]


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
    (room,) = host_room.rooms_of(RankSlot(0, node, 0, "cuda", None), 1)
    assert (room.kind, room.bytes_free, room.bytes_per_s, room.link) == ("memory", None, 12e9, None)


def test_each_card_of_a_machine_has_its_own_link() -> None:
    cards = {"pcie_generation": 4, "pcie_width": 16}, {"pcie_generation": 3, "pcie_width": 4}
    assert [room_of(*cards, at=place).link for place in (0, 1)] == [PcieLink(generation=4, lanes=16), PcieLink(generation=3, lanes=4)]


def test_the_disk_beside_a_processor_has_no_link() -> None:
    room = room_of({"pcie_generation": 4, "pcie_width": 16}, device="cpu")
    assert (room.kind, room.bytes_per_s, room.link) == ("disk", host_room.DISK_BYTES_PER_S, None)


def machine(memory_gb: float, disk_gb: float | None, *, wsl: bool = False, turns: bool | None = None) -> dict[str, Any]:
    """So much is free."""
    disk = None if disk_gb is None else int(disk_gb * GB)
    return {
        "system": {"memory_total_bytes": 64 * GB, "memory_available_bytes": int(memory_gb * GB)},
        "resources": {"disk_free_bytes": disk, "disk_turns": turns},
        "network": {"wsl": "NAT" if wsl else None},
    }


def test_the_last_resorts_of_a_card() -> None:
    """Pinned memory; where little can be pinned, the rest of the memory; then the disk. Each with its own rate, and none faster than the card's link."""
    memory, disk = rooms_of({}, **machine(20, 100))
    assert (memory.kind, memory.bytes_free, memory.bytes_per_s) == ("memory", 16 * GB, 12e9)
    assert (disk.kind, disk.bytes_free, disk.bytes_per_s, disk.pinned_free) == ("disk", 50 * GB, 1.5e9, 16 * GB)
    memory, pageable, disk = rooms_of({}, **machine(20, 100, wsl=True))
    assert (memory.bytes_free, pageable.kind, pageable.bytes_free, pageable.pinned_free) == (8 * GB, "pageable", 16 * GB, 8 * GB)
    assert (pageable.bytes_per_s, disk.pinned_free) == (5e9, 8 * GB)
    riser = {"pcie_generation": 3, "pcie_width": 1}
    assert {round(room.bytes_per_s / 1e9, 2) for room in rooms_of(riser, **machine(20, 100, wsl=True))} == {0.79}
    assert [room.kind for room in rooms_of({}, **machine(20, None))] == ["memory"], "nobody knows its disk"


@pytest.mark.parametrize(("turns", "gb_per_s"), [(True, 0.12), (False, 1.5), (None, 1.5)])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_hard_disk_is_slow(device: str, turns: bool | None, gb_per_s: float) -> None:
    assert rooms_of({}, device=device, **machine(20, 100, turns=turns))[-1].bytes_per_s == gb_per_s * GB


def test_ranks_of_a_machine_share_its_rooms() -> None:
    alone, one_of_two = (rooms_of({}, {}, sharing=sharing, **machine(20, 100)) for sharing in (1, 2))
    assert [room.bytes_free for room in one_of_two] == [(room.bytes_free or 0) // 2 for room in alone]


def test_what_has_room_where() -> None:
    """Blocks of pinned memory are powers of two; those of a disk are not, and inputs lie in memory whatever holds the layers."""
    memory, pageable, disk = rooms_of({}, **machine(20, 100, wsl=True))
    third = 2**30 // 3 * 2  # 0.7 GB, 1.07 GB when pinned
    assert memory.takes(7, third) and not memory.takes(8, third)
    assert pageable.takes(22, third) and not pageable.takes(23, third)
    assert disk.takes(69, third, 5, third) and not disk.takes(70, third)
    assert memory.takes(5, third, 2, third) and not memory.takes(5, third, 3, third)
    assert pageable.takes(19, third, 2, third) and not pageable.takes(19, third, 3, third)
    for last in (pageable, disk):
        assert last.takes(1, third, 7, third) and not last.takes(1, third, 8, third), "inputs are pinned, and little can be"
    assert host_room.HostRoom("memory", None, 1e9).takes(10**6, 10**9)

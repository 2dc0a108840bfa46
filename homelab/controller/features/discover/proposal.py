"""From the facts of machines to what cluster.toml says of them: their cards, their names, the network that they share. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from homelab.controller.base import hardware
from homelab.controller.base.sanitize import plain_name
from homelab.controller.base.units import gibibytes, memory_gb
from homelab.controller.config.cluster import Node
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines import cards

_VRAM_TOLERANCE = 0.10  # an "8 GB" card answers 8188 MiB


@dataclass(frozen=True)
class SharedNetwork:
    """A network that all the machines are in. `speed_mbit`: of the slowest link, None where one does not tell its own; `is_wired`: no machine is in it by Wi-Fi."""

    network: str
    is_wired: bool
    speed_mbit: int | None


def gpus_of(facts: Facts) -> tuple[dict[str, str | int | float], ...]:
    """The cards as `gpus` of cluster.toml has them; empty where there is none, or where the memory of one is not known."""
    found: list[dict[str, str | int | float]] = []
    for card in cards.everything(facts):
        sheet = hardware.lookup(card.name)
        memory = card.memory_total_bytes or (sheet.memory_bytes if sheet else None)
        if memory is None and nvidia_answer.shares_memory(card, facts):
            memory = facts.system.memory_total_bytes
        if not memory:
            return ()
        found.append({"model": cards.short(plain_name(card.name)), "vram_gb": max(1, round(gibibytes(memory)))})
    return tuple(found)


def has_changed_cards(node: Node, facts: Facts) -> bool:
    """Whether `gpus` is missing or wrong. Fewer cards than there are, or cards by uuid or index, are a choice of the owner; a driver that shows
    no card proves nothing."""
    there, chosen = cards.everything(facts), node.gpus
    if not there or any(gpu.uuid or gpu.index is not None for gpu in chosen) or 0 < len(chosen) < len(there):
        return False
    if len(chosen) != len(there):
        return True
    return any(
        not cards.same_card(gpu.model, card.name)
        or (card.memory_total_bytes is not None and abs(gibibytes(card.memory_total_bytes) / gpu.vram_gb - 1) > _VRAM_TOLERANCE)
        for gpu, card in cards.pairs(chosen, there)
    )


def about(facts: Facts) -> str:
    """One line of what a machine is."""
    system = facts.system
    words = [plain_name(system.os), f"{system.cpu_count} core{'s' if system.cpu_count != 1 else ''}"]
    words += [f"{memory_gb(system.memory_total_bytes, 0)} GB memory"] if system.memory_total_bytes else []
    words += [] if cards.everything(facts) else ["no NVIDIA card"]
    return ", ".join(word for word in words if word.strip())


def same_machines(names: Iterable[str], facts: Mapping[str, Facts]) -> dict[str, str]:
    """{name: name that stays} of nodes that are one machine with one workdir under several names."""
    first: dict[str, str] = {}
    others = {}
    for name in names:
        identity = facts[name].resources.workdir_identity if name in facts else None
        if identity and first.setdefault(identity, name) != name:
            others[name] = first[identity]
    return others


def shared_networks(facts: Iterable[Facts]) -> list[SharedNetwork]:
    """The IPv4 networks that every one of at least two machines is in by cable or Wi-Fi; the best one first: wired, then fast."""
    machines = [_networks(one) for one in facts]
    if len(machines) < 2:
        return []
    shared = []
    for network in machines[0]:
        if all(network in machine for machine in machines):
            links = [machine[network] for machine in machines]
            speeds = [speed for _, speed in links if speed]
            shared.append(
                SharedNetwork(network, all(is_wired for is_wired, _ in links), min(speeds) if len(speeds) == len(links) else None)
            )
    return sorted(shared, key=lambda one: (not one.is_wired, -(one.speed_mbit or 0), one.network))


def _networks(facts: Facts) -> dict[str, tuple[bool, int | None]]:
    """network -> (by cable, speed in Mbit/s)."""
    found: dict[str, tuple[bool, int | None]] = {}
    for interface in facts.network.interfaces:
        if interface.up and interface.kind in ("physical", "wifi"):
            for address in interface.addresses:
                place = ipaddress.ip_interface(address)
                if place.version == 4 and place.network.prefixlen < 32:
                    found.setdefault(str(place.network), (interface.kind == "physical", interface.speed_mbit))
    return found

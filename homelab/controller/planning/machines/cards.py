"""Which cards of a node are ranks: all of them, or those that `gpus` of cluster.toml names where it names fewer. Pure.

A card beside the one that trains (an old one for the display) would be a rank otherwise: slower than all others, or without kernels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from homelab.controller.base import hardware
from homelab.controller.base.errors import InputError
from homelab.controller.base.units import gibibytes
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import restart
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.types import Choice, SpareCard
from homelab.shared.protocol.card_messages import GpuFacts


def chosen(node: Node, facts: Facts) -> Facts:
    """The facts with the cards that take part in `gpu.cards`, and the others in `gpu.left_out`. What torch and the driver's log say of those is
    left out too: a card that is not used is not judged."""
    cards = everything(facts)
    if _takes_all(node, cards):
        return facts
    indexes = {card.index for card in _meant(node.gpus, cards) if card is not None}
    used = tuple(card for card in cards if card.index in indexes)
    others = tuple(card for card in cards if card.index not in indexes)
    hidden = {nvidia_answer.slot(card.bus_id) for card in others if card.bus_id}
    xids = None if facts.xid is None else tuple(xid for xid in facts.xid if nvidia_answer.slot(xid.bus_id) not in hidden)
    probe = _of_cards(facts.gpu.torch, cards, used)
    return facts.model_copy(update={"gpu": facts.gpu.model_copy(update={"cards": used, "left_out": others, "torch": probe}), "xid": xids})


def of_cluster(cluster: Cluster, facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """The same for all nodes. Raises InputError for a node without a card that cluster.toml points at."""
    chosen_facts = dict(facts)
    for node in cluster.nodes:
        node_facts = facts.get(node.name)
        if node_facts is not None:
            for fault in missing(node, node_facts):
                raise InputError(fault, where=f"cluster.toml, node {node.name}, gpus", hint=choose(node, node_facts))
            chosen_facts[node.name] = chosen(node, node_facts)
    return chosen_facts


def missing(node: Node, facts: Facts) -> list[str]:
    """What is wrong with each card that cluster.toml points at, or chooses by its name among several: it is not there, or is another one.

    Where no choice is made (as many are described as are there) differences are the inventory's business.
    """
    cards = everything(facts)
    if not cards or _takes_all(node, cards):
        return []
    faults = []
    for belief, card in zip(node.gpus, _meant(node.gpus, cards), strict=True):
        name = belief.uuid or (f"GPU {belief.index}" if belief.index is not None else f'"{belief.model}"')
        both = [f"GPU {one.index}" for one in cards if belief.uuid is not None and _fits(belief, one)]
        if len(both) > 1:
            faults.append(
                f"{name} of cluster.toml is the beginning of several uuids ({', '.join(both)}); use a longer one: {described(cards)}"
            )
        elif card is None:
            faults.append(f"cluster.toml names the card {name}, but it is not there: {described(cards)}")
        elif not same_card(belief.model, card.name):
            faults.append(f'cluster.toml says that {name} is a "{belief.model}", but it is a {short(card.name)}: {described(cards)}')
    return faults


def pairs(beliefs: Sequence[Gpu], cards: Sequence[GpuFacts]) -> list[tuple[Gpu, GpuFacts]]:
    """Each card that the owner named with the one that is meant; what is left of both, in order."""
    matches = list(zip(beliefs, _meant(beliefs, cards), strict=True))
    indexes = {card.index for _, card in matches if card is not None}
    left = zip((belief for belief, card in matches if card is None), (card for card in cards if card.index not in indexes), strict=False)
    return [(belief, card) for belief, card in matches if card is not None] + list(left)


def spare(facts: Facts | None) -> tuple[SpareCard, ...]:
    """The cards of a node that take no part."""
    return tuple(SpareCard(index=card.index, name=card.name) for card in (facts.gpu.left_out if facts else ()))


def choices(machines: Machines) -> list[Choice]:
    """The reason for each card that takes no part."""
    reasons = []
    for name in machines.names:
        for card in spare(machines.facts.get(name)):
            because = f"`gpus` of {name} in cluster.toml does not name this {short(card.name)}"
            reasons.append(Choice(subject=f"GPU {card.index} of {name}", value="left out", because=because))
    return reasons


def everything(facts: Facts) -> tuple[GpuFacts, ...]:
    """Every card of the node in nvidia-smi's order, whether a choice was made already or not."""
    return tuple(sorted((*facts.gpu.cards, *facts.gpu.left_out), key=lambda card: card.index))


def described(cards: Sequence[GpuFacts]) -> str:
    """The cards that a person chooses from: `GPU 0 is a RTX 3070 Ti (GPU-5e1c...), GPU 1 is ...`."""
    return ", ".join(f"GPU {card.index} is a {short(card.name)}{f' ({card.uuid})' if card.uuid else ''}" for card in cards)


def choose(node: Node, facts: Facts) -> str:
    """The edit of cluster.toml that fixes a choice of missing cards; for one that stopped answering, what brings it back."""
    if nvidia_answer.is_a_card_lost(facts):
        return f"a card of {node.name} no longer answers its driver: {restart(node, facts)}, then: homelab preflight --only gpu"
    return f"{edit(node, everything(facts))}, without those that are not to train"


def edit(node: Node, cards: Sequence[GpuFacts]) -> str:
    """The line of cluster.toml that names these cards, by uuid where the owner points at any."""
    believed = {card.index: belief for belief, card in pairs(node.gpus, cards)}
    entries = []
    for card in cards:
        if card.memory_total_bytes is not None:
            vram = f"{round(gibibytes(card.memory_total_bytes))}"
        else:
            sheet, belief = hardware.lookup(card.name), believed.get(card.index)
            vram = f"{belief.vram_gb:g}" if belief else f"{round(gibibytes(sheet.memory_bytes)) if sheet else '?'}"
        uuid = f", uuid = {json.dumps(card.uuid)}" if card.uuid and any(map(_is_pointed_at, node.gpus)) else ""
        entries.append(f"{{ model = {json.dumps(short(card.name))}, vram_gb = {vram}{uuid} }}")
    return f"edit cluster.toml, node {node.name}: gpus = [{', '.join(entries)}]"


def same_card(believed: str, answered_name: str) -> bool:
    """Whether the owner's name and nvidia-smi's mean one card: "3070ti" is "NVIDIA GeForce RTX 3070 Ti", not its laptop part.

    Memory sizes in the name do not count here (they are compared in bytes). Cards that the table does not know match when
    every word of the owner is in the driver's name.
    """
    first, second = hardware.lookup(believed), hardware.lookup(answered_name)
    if first and second:
        return _without_size(first.name) == _without_size(second.name)
    words = re.findall(r"[a-z]+|\d+", _without_size(believed).lower())
    answered_words = re.findall(r"[a-z]+|\d+", answered_name.lower())
    return all(word in answered_words for word in words)


def short(name: str) -> str:
    """`RTX 3070 Ti` of "NVIDIA GeForce RTX 3070 Ti"."""
    return re.sub(r"^(NVIDIA\s+)?(GeForce\s+)?|\s+GPU$", "", name)


def _takes_all(node: Node, cards: Sequence[GpuFacts]) -> bool:
    """True where nothing has to be chosen: no card is named, or all are named without a uuid or an index."""
    return not node.gpus or (len(node.gpus) >= len(cards) and not any(map(_is_pointed_at, node.gpus)))


def _is_pointed_at(belief: Gpu) -> bool:
    return belief.uuid is not None or belief.index is not None


def _meant(beliefs: Sequence[Gpu], cards: Sequence[GpuFacts]) -> list[GpuFacts | None]:
    """The card that each entry of cluster.toml means: by uuid or index first (a whole uuid before the beginning of one), then by name; of several with
    one name (an RTX 3060 was sold with 12 and with 8 GB) the one whose memory is nearest to `vram_gb`."""
    left = list(cards)
    matches: list[GpuFacts | None] = [None] * len(beliefs)
    for number in sorted(range(len(beliefs)), key=lambda number: (not _is_pointed_at(beliefs[number]), -len(beliefs[number].uuid or ""))):
        places = [place for place, card in enumerate(left) if _fits(beliefs[number], card)]
        place = min(places, key=lambda place: _memory_off(beliefs[number], left[place]), default=None)
        matches[number] = None if place is None else left.pop(place)
    return matches


def _memory_off(belief: Gpu, card: GpuFacts) -> int:
    """Whole GiB between what the owner says and what the card does; 0 where it says nothing."""
    return 0 if card.memory_total_bytes is None else round(abs(gibibytes(card.memory_total_bytes) - belief.vram_gb))


def _fits(belief: Gpu, card: GpuFacts) -> bool:
    if belief.uuid is not None:
        return card.uuid is not None and card.uuid.lower().startswith(belief.uuid.lower())
    if belief.index is not None:
        return card.index == belief.index
    return same_card(belief.model, card.name)


def _of_cards(probe: dict[str, Any] | None, cards: Sequence[GpuFacts], used: Sequence[GpuFacts]) -> dict[str, Any] | None:
    """What torch said of these cards alone: by uuid, and where it tells none by its place, if it saw as many as there are."""
    devices = (probe or {}).get("devices")
    if probe is None or not devices:
        return probe
    indexes, uuids, known_uuids = {card.index for card in used}, {card.uuid for card in used}, {card.uuid for card in cards} - {None}
    if all(device.get("uuid") in known_uuids for device in devices):
        devices = [device for device in devices if device["uuid"] in uuids]
    elif len(devices) == len(cards):
        devices = [device for card, device in zip(cards, devices, strict=True) if card.index in indexes]
    return {**probe, "devices": devices}


def _without_size(name: str) -> str:
    return re.sub(r"\s*\b\d+\s*GB\b", "", name, flags=re.IGNORECASE).removesuffix(" PCIe")

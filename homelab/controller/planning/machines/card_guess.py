"""The data sheet of every rank's card, and what stands in its place for a card that no sheet knows, or that says something impossible of itself. Pure."""

from __future__ import annotations

from homelab.controller.base import hardware
from homelab.controller.base.hardware import CARDS, Card
from homelab.controller.base.units import binary_size, listed
from homelab.controller.facts.card_generation import Capability
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.machines import Machines, RankSlot
from homelab.controller.planning.speed import power_limit
from homelab.controller.planning.types import Choice, TimeEstimate

_ALIKE = 0.9  # a card with so much of the memory of another is of the same class


def sheets(machines: Machines) -> dict[str, list[Card]]:
    """A card per rank of every node, in their order: that of its name, or the nearest that is known, as fast as its power limit lets it be."""
    found: dict[str, list[Card]] = {name: [] for name in machines.names}
    for slot in machines.slots:
        sheet = hardware.lookup(slot.name) or slowest_like(slot.capability, slot.memory()[0])
        found[slot.node.name].append(power_limit.limited(sheet, *_limits(slot)))
    return found


def choices(machines: Machines) -> list[Choice]:
    """The cards that are counted as slower than their data sheets, because they may not draw the power."""
    if machines.device != "cuda":
        return []
    found = []
    for slot in machines.slots:
        sheet, limits = hardware.lookup(slot.name), _limits(slot)
        if sheet is not None and (limited := power_limit.limited(sheet, *limits)) != sheet:
            part = f"until a run measures it: {limited.peak_flops / sheet.peak_flops:.0%} of its data sheet's speed"
            value = f"{limits[0]:.0f} of {power_limit.most_w(sheet, limits[1]):.0f} W"
            found.append(Choice(subject=f"power limit, {_named(slot)}", value=value, because=part))
    return found


def _limits(slot: RankSlot) -> tuple[float | None, float | None]:
    """The limit of the card's power, and the driver's default for it, in watts; None where nvidia-smi does not tell."""
    card = slot.facts.gpu.cards[slot.local_rank] if slot.facts else None
    return (card.power_limit_w, card.power_limit_default_w) if card else (None, None)


def slowest_like(capability: Capability | None, memory_bytes: int | None) -> Card:
    """The slowest card that is known of this generation and as much memory: a guess that disappoints nobody. Of a generation that is not known, the
    nearest older one counts; where nothing is known of it, all do."""
    generations = sorted({card.compute_capability for card in CARDS})
    older = [generation for generation in generations if capability is None or generation <= capability]
    alike = [card for card in CARDS if capability is None or card.compute_capability == (older or generations[:1])[-1]]
    if memory_bytes is not None:
        as_large = [card for card in alike if card.usable_bytes() >= _ALIKE * memory_bytes]
        alike = as_large or [max(alike, key=lambda card: card.memory_bytes)]
    return min(alike, key=lambda card: card.peak_flops)


def warnings_of(machines: Machines, time: TimeEstimate | None) -> list[str]:
    """The cards whose speed is taken from another one, unless it was measured, and those with a memory that theirs never had."""
    if machines.device != "cuda":
        return []
    measured = {rank.rank for rank in time.ranks if rank.source == "measured"} if time else set()
    slots = [slot for slot in machines.slots if slot.rank not in measured]
    guessed: dict[str, list[str]] = {}
    for slot in slots:
        if hardware.lookup(slot.name) is None:
            guessed.setdefault(_guess(slot), []).append(_named(slot))
    lines = [f"{listed(dict.fromkeys(names))}: {text}" for text, names in guessed.items()]
    return [*lines, *dict.fromkeys(filter(None, map(_impossible_memory, machines.slots)))]


def _guess(slot: RankSlot) -> str:
    capability, memory_bytes = slot.capability, slot.memory()[0]
    like = slowest_like(capability, memory_bytes)
    generation = f"generation {capability[0]}.{capability[1]}" if capability else "any generation"
    return (
        f"homelab has no data sheet of this card: its time and its share are guessed from the {like.name} (the slowest of {generation} with its memory);"
        " the first run measures it (homelab launch RECIPE); or set `speed` of every node in cluster.toml"
    )


def _impossible_memory(slot: RankSlot) -> str | None:
    card, memory_bytes = hardware.lookup(slot.name), slot.memory()[0]
    if card is None or memory_bytes is None or (slot.facts and slot.facts.gpu.cards[slot.local_rank].mig):
        return None
    if card.can_have(memory_bytes):
        return None
    says = "nvidia-smi says" if slot.facts else "cluster.toml says"
    mend = (
        "a card with a false name answers like this; the plan uses it, and"
        if slot.facts
        else f"if it is true, edit gpus of {slot.node.name}:"
    )
    return f"{_named(slot)}: {says} {binary_size(memory_bytes)}, but this card has {binary_size(card.memory_bytes)}: {mend} a step may end without memory"


def _named(slot: RankSlot) -> str:
    return f"{cards.short(slot.name)} of {slot.node.name}"

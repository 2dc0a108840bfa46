"""Which card of a node is measured, with what, and why not. Pure."""

from __future__ import annotations

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import binary_size
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.features.bench import card_recipe
from homelab.controller.features.bench.card_recipe import CardRecipe, Kind
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.machines import host_memory
from homelab.shared.protocol.card_messages import GpuFacts


def refuse_unready(node: str, facts: Facts, kind: Kind) -> None:
    """Raises HomelabError where packages are missing, or a run is at work on the node."""
    needed = ("torch", "transformers", "peft", "accelerate", *(("bitsandbytes",) if kind == "qlora" else ()))
    missing = [name for name in needed if name not in facts.python.packages]
    if missing:
        raise HomelabError(
            f"this node's Python has no {', '.join(missing)}", where=f"node {node}, {facts.python.executable}", hint=homelab("setup", node)
        )
    if facts.runs.alive:
        run = facts.runs.alive[0]
        raise HomelabError(
            "a run is at work on this node: a card that trains already would measure neither", where=f"node {node}, run {run}",
            hint=Hint("wait for its end ({}), or end it: {}", homelab("status", run), homelab("stop", run)),
        )  # fmt: skip


def card(node: str, facts: Facts, index: int | None) -> GpuFacts | None:
    """The card that is measured; None for the CPU of a node without cards. Raises InputError for a number that is none, HomelabError for a card in use."""
    everything = cards.everything(facts)
    if index is None:
        card = facts.gpu.cards[0] if facts.gpu.cards else None
    else:
        card = next((one for one in everything if one.index == index), None)
        if card is None:
            there = ", ".join(f"{one.index} ({cards.short(one.name)})" for one in everything) or "none"
            raise InputError(
                f"this node has no card {index}; it has {there}", where=f"--card, node {node}", hint=homelab("bench card", node)
            )
    holders = [one for one in card.holders if "C" in one.type] if card else []
    if card and holders:
        by = ", ".join(f"{one.program or 'a process'}{f' (pid {one.pid})' if one.pid else ''}" for one in holders[:3])
        raise HomelabError(
            f"something computes on this card: {by}", where=f"node {node}, GPU {card.index} ({cards.short(card.name)})",
            hint=Hint("end it there, then again: {}", homelab("bench card", node)),
        )  # fmt: skip
    return card


def recipe(node: str, facts: Facts, card: GpuFacts | None, kind: Kind) -> CardRecipe:
    """The widest model that has room. Raises HomelabError where none has."""
    total, held = host_memory(facts.system)
    host = None if total is None else total - held
    free = host if card is None or nvidia_answer.shares_memory(card, facts) else card.free_bytes
    recipe = card_recipe.choose("cuda" if card else "cpu", kind, free, host)
    if recipe is None:
        smaller = homelab("bench card", node, "--method qlora" if kind == "lora" else "")
        hint = Hint(
            "end what holds it (nvidia-smi, or ps aux --sort=-rss | head, names it){}: {}",
            ", or measure with a smaller base" if kind == "lora" else "; then",
            smaller,
        )
        rest = f"; of the machine {binary_size(host)}" if card and host is not None else ""
        free_text = "an unknown part" if free is None else binary_size(free)
        raise HomelabError(f"no model that measures it has room: {free_text} of its memory is free{rest}", where=f"node {node}", hint=hint)
    return recipe

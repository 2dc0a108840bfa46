"""gpu.memory: who holds what is not free of a card's memory, and how it is freed."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, chain, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.base.units import GIB, binary_size, listed
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.machine import runs as alive
from homelab.controller.config.cluster import Node
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import nvidia_smi, on_node, restart
from homelab.controller.planning.machines.cards import short
from homelab.shared.protocol.card_messages import GpuFacts, GpuHolder

FEW_FREE_BYTES = GIB  # less does not even hold a CUDA context and a small model's step
DESKTOP_BYTES = GIB  # memory that a desktop session uses by itself
DESKTOP_SHARE = 0.10
_NAMED = 3  # holders that a message names; a desktop has dozens


@check("gpu.memory", "no other program fills the memory of the cards", worst="fail", sees="gpu", after="gpu.inventory")
def memory(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """What others hold of each card's memory: fail where next to nothing is left, warn above what a desktop takes.

    Where a run of ours is among them that is left over, the fix stops it; one that trains is waited for.
    """
    if not node.gpus:
        return
    for card in facts.gpu.cards:
        total, used = card.memory_total_bytes, card.memory_used_bytes
        free = card.free_bytes
        if total is None or used is None or free is None:
            if not nvidia_answer.shares_memory(card, facts):
                yield _unknown(node, facts, card)
            continue
        if used <= max(DESKTOP_BYTES, DESKTOP_SHARE * total) and free >= FEW_FREE_BYTES:
            continue
        by = f" by {_holders(card)}" if card.holders else ""
        message = f"{binary_size(used)} of GPU {card.index}'s {binary_size(total)} is in use{by}"
        runs = sorted({holder.run for holder in card.holders if holder.run})
        if not runs and not card.holders:
            runs = list(facts.runs.alive)  # in a container nvidia-smi names no process
        stale = [run for run in runs if alive.why_stale(facts, run)]
        if runs and not stale:
            hint = Hint("{} {}; start after it: {}", runs[0], alive.what_it_does(evidence, node, facts, runs[0]), alive.after(runs[0]))
            yield Problem("warn", message, hint, is_busy=free < FEW_FREE_BYTES)
            continue
        fix = chain(*(homelab("stop", run) for run in stale))
        yield Problem("fail" if free < FEW_FREE_BYTES else "warn", message, fix or _hint(node, facts, card), fix)


def _unknown(node: Node, facts: Facts, card: GpuFacts) -> Problem:
    """A card with memory of its own that does not say how much is wrong."""
    message = f"nvidia-smi does not say how much memory of GPU {card.index} ({short(card.name)}) is free: homelab cannot tell whether the training fits"
    hint = f"{on_node(node, nvidia_smi(facts, '-q -d MEMORY'))}; if it shows N/A: {restart(node, facts)}, or another driver"
    return Problem("warn", message, hint)


def _holders(card: GpuFacts) -> str:
    named = [_of(holder) for holder in card.holders[:_NAMED]]
    more = len(card.holders) - _NAMED
    return listed([*named, f"{more} more"] if more > 0 else named)


def _of(holder: GpuHolder) -> str:
    about = []
    if holder.run:
        about.append(f"run {holder.run}")
    if holder.pid is not None:
        about.append(f"pid {holder.pid}")
    if holder.user:
        about.append(f"user {holder.user}")
    if holder.memory_bytes:
        about.append(binary_size(holder.memory_bytes))
    return (holder.program or "a program") + (f" ({', '.join(about)})" if about else "")


def _hint(node: Node, facts: Facts, card: GpuFacts) -> str:
    computing = [holder for holder in card.holders if "C" in holder.type and holder.pid is not None]
    pids = [str(holder.pid) for holder in computing if holder.ours]
    if pids:
        return f"if that program is not needed: {on_node(node, quote_words(['kill', *pids]))}"
    users = sorted({holder.user for holder in computing if holder.user})
    if users:
        return f"ask {listed(users)} to end it; to see it: {on_node(node, nvidia_smi(facts))}"
    if card.holders and all(holder.type == "G" for holder in card.holders):
        return f"log out of the desktop there, or close its programs; to see them: {on_node(node, nvidia_smi(facts))}"
    return f"close the programs that use it; to see them: {on_node(node, nvidia_smi(facts))}"

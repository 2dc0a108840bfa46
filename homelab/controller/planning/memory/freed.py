"""The memory of a node as it will be when a run is gone from it. Pure.

A card names what each process holds. A machine's memory does not: there all that is in use counts as the run's, so that room is denied only where there
is none for sure.
"""

from __future__ import annotations

from homelab.controller.facts.node import Facts
from homelab.shared.protocol.card_messages import GpuFacts


def without_run(facts: Facts, run: str) -> Facts:
    """The same facts, where no process of this run is alive any more. They are as they were where none is."""
    held = [holder for card in facts.gpu.cards for holder in card.holders if holder.run == run]
    if run not in facts.runs.alive and not held:
        return facts
    gpu = facts.gpu.model_copy(update={"cards": tuple(_card(card, run) for card in facts.gpu.cards)})
    system = facts.system.model_copy(update={"memory_available_bytes": facts.system.memory_total_bytes, "memory_limit_used_bytes": 0})
    return facts.model_copy(update={"gpu": gpu, "system": system})


def _card(card: GpuFacts, run: str) -> GpuFacts:
    own = [holder.memory_bytes for holder in card.holders if holder.run == run]
    if card.holders and not own:  # in a container nvidia-smi names no process
        return card
    used = card.memory_used_bytes or 0
    freed = used if None in own or not own else min(used, sum(size or 0 for size in own))
    free = None if card.memory_free_bytes is None else card.memory_free_bytes + freed
    return card.replace(memory_used_bytes=used - freed, memory_free_bytes=free, mig_free_bytes=card.mig_bytes)

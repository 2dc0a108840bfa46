"""gpu: the cards are those of cluster.toml, nobody else fills their memory, and torch can compute on them."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.units import GIB, binary_size, listed
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, answered
from homelab.controller.config.cluster import Node
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import on_node
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.cards import same_card, short

VRAM_TOLERANCE = 0.10  # an "8 GB" card answers 8188 MiB, a "24 GB" L4 with ECC 23034 MiB


@check("gpu.inventory", "the cards and their memory are those of cluster.toml", worst="fail", sees="gpu", after="gpu.mismatch")
def inventory(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """Count, names and memory against cluster.toml: fail where the owner counts on more than is there, or points at a card that is not, else warn.

    Cards beyond those that are named take no part (`homelab.controller.planning.machines.cards`): that is a choice, and no fault.
    """
    if facts.gpu.nvidia_smi != "ok":
        return
    if node.gpus:
        messages = cards.missing(node, facts)
        if nvidia_answer.is_a_card_lost(facts) and len(cards.everything(facts)) < len(node.gpus):
            return  # gpu.driver and gpu.xid say what brings it back; it is no reason to change cluster.toml
        yield from (Problem("fail", message, cards.choose(node, facts)) for message in messages)
        if not messages:
            yield from _against_belief(node, cards.chosen(node, facts))
    elif facts.gpu.cards:
        message = f"cluster.toml names no GPU here, but there is {_names(facts)}: a plan uses it, and does not use nodes without a card"
        yield Problem("warn", message, cards.edit(node, facts.gpu.cards))


@check("gpu.amd", "the cards of cluster.toml are NVIDIA's", worst="fail", sees="amd", after="gpu.xid")
def amd(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the owner counts on a card of AMD: nothing would be trained on it. Silent where a card of NVIDIA waits for its driver."""
    if node.gpus and facts.amd and not facts.gpu.cards and not facts.gpu.are_on_bus:
        cards_text = listed(card.name for card in facts.amd)
        message = f"{cards_text} is a card of AMD, and training needs CUDA: this node would compute on its CPU; together with NVIDIA nodes it is left out"
        yield Problem("fail", message, f"edit cluster.toml, node {node.name}: gpus = []")


@check("gpu.mixed", "either all nodes have a card, or none", worst="warn", sees="gpu")
def mixed(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn for nodes without a card beside nodes with one: the plan leaves them out (`homelab.controller.planning.plan`).

    NCCL needs a card for every rank, and gloo over all CPUs would give the cards away. Nodes whose cards are only missing, and
    cards that cluster.toml does not name, are the business of the other checks.
    """
    nodes = [(node, facts) for node, facts in answered(evidence) if "gpu" not in facts.broken]
    with_cards = [node.name for node, facts in nodes if facts.gpu.cards and node.gpus]
    without = [(node, facts) for node, facts in nodes if not facts.gpu.cards and not node.gpus]
    if not with_cards:
        return
    for node, facts in without:
        hardware = f"only {listed(card.name for card in facts.amd)}" if facts.amd else "no card"
        cores = facts.system.cpu_count
        message = (
            f"it has {hardware}, so it takes no part in training: {listed(with_cards)} compute{'s' if len(with_cards) == 1 else ''} "
            f"without it over NCCL; its {cores} core{'s' * (cores != 1)} would slow every step down"
        )
        hint = f"take {node.name} out of cluster.toml, or train on CPUs alone with a cluster.toml of nodes without cards (gloo)"
        yield node.name, Problem("warn", message, hint)


@check("gpu.own", "no two nodes have the same card", worst="fail", sees="gpu", after="gpu.mixed")
def own(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where a card stands behind two nodes: NCCL refuses two ranks on one card ("Duplicate GPU detected"), and its memory would be counted twice."""
    first: dict[str, str] = {}
    for node, facts in answered(evidence):
        for card in cards.chosen(node, facts).gpu.cards:
            other = first.setdefault(card.uuid, node.name) if card.uuid else node.name
            if other != node.name:
                message = f"GPU {card.index}, {short(card.name)} {card.uuid}, is a card of {other}, too: they are one machine, or containers that share a card"
                yield (
                    node.name,
                    Problem("fail", message, f"edit cluster.toml: take {node.name} or {other} out, or give each container its own card"),
                )


def _against_belief(node: Node, facts: Facts) -> Iterator[Problem]:
    believed, present = len(node.gpus), len(facts.gpu.cards)
    if believed > present:
        message = f"cluster.toml names {believed} GPU{'s' if believed > 1 else ''}, nvidia-smi shows {_names(facts) or 'none'}"
        yield Problem("fail", message, cards.edit(node, facts.gpu.cards) if present else on_node(node, "lspci | grep -i nvidia"))
    for belief, card in cards.pairs(node.gpus, facts.gpu.cards):
        if not same_card(belief.model, card.name):
            message = f'GPU {card.index} is a {short(card.name)}, not a "{belief.model}"'
            yield Problem("warn", message, cards.edit(node, facts.gpu.cards))
        if card.memory_total_bytes is None:
            continue
        ratio = card.memory_total_bytes / (belief.vram_gb * GIB)
        if abs(ratio - 1) > VRAM_TOLERANCE:
            message = f"GPU {card.index} has {binary_size(card.memory_total_bytes)}, cluster.toml says {belief.vram_gb:g}"
            yield Problem("fail" if ratio < 1 else "warn", message, cards.edit(node, facts.gpu.cards))


def _names(facts: Facts) -> str:
    return listed(short(card.name) for card in facts.gpu.cards)


@subject("gpu", "the cards are those of cluster.toml, healthy and free, and torch computes on them", after="python")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if not node.gpus:
        others = [card.name for card in facts.amd]
        return f"CPU node ({listed(others)} is not used: training needs CUDA)" if others else "CPU node"
    parts = []
    for card in facts.gpu.cards:
        free = "" if card.free_bytes is None else f", {binary_size(card.free_bytes)} free"
        parts.append(f"{short(card.name)}{free}")
    parts += [f"{short(card.name)} is left out" for card in facts.gpu.left_out]
    return "; ".join(parts)
